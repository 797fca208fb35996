import sys; sys.path.insert(0,"/work/main/tests")
import torch, torch.distributed as dist, os, copy
from parity.programs import *
from mizzen.parallel.zero.slots import *
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.engine.update import Updater, Tally
from mizzen.engine.runner import Accumulate
from mizzen.engine.optimizer import repoint
def train(case):
    w=dist.get_world_size(); r=dist.get_rank(); g=dist.group.WORLD if w>1 else None
    model=build(case); 
    gs=groups(model,case); member={id(p):i for i,gr in enumerate(gs) for p in gr["params"]}
    held=lambda p: "bfloat16" if case.dtype=="bf16" else "float32"
    ts=[Tenant(n,tuple(p.shape),held(p),member[id(p)]) for n,p in model.named_parameters() if p.requires_grad]
    for p in model.parameters():
        if not p.requires_grad and case.dtype=="bf16": p.data=p.data.bfloat16()
    opt={"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer](gs, **case.config["optimizer"]["params"], fused=True)
    st=case.stage if w>1 else 0
    store=FlatStore(lay_out(ts,chunks=w,bucket_elements=2000),dict(model.named_parameters()),Holding(st,Reduction(w,"float32",1.,1/w,case.deterministic),"float32"),g)
    repoint(opt,store.masters(),{})
    up=Updater([store],opt,g,max_norm=case.clip,gain=1.); run=Accumulate(model,[store])
    losses=[]
    for s in range(STEPS):
        t=run.run(micro_batches(case,s,r),None); o=up.update(t); losses.append(o.loss); assert o.applied
    return losses
def main():
    import pool
    P=pool.Pool()
    for case in [Case(0,1),Case(0,2),Case(1,2),Case(2,2),Case(0,4,2,.5,samples=16),Case(1,4,2,.5,samples=16),Case(2,4,2,.5,samples=16),Case(2,4,2,.5,deterministic=True,samples=16),Case(2,2,2,.5,"unused"),Case(1,2,2,.5,"tied","bf16"),Case(2,2,2,.5,"frozen","bf16","SGD"),Case(2,2,1,.5,"groups")]:
        e,_=reference(case); out=pool.World(P,case.world,"gloo").run(train,case)
        print(case, max(abs(a-b)/b for a,b in zip(out[0],e)), all(o==out[0] for o in out))
    P.close()
