"""Schedules of pipelines as scripts know them: steps of instructions, classes to subclass, and the table of each."""

import pytest
import torch

from drop_in import programs
from mizzen.errors import PlanError, UsageError
from mizzen.parallel.pipeline.tables import make_schedule


@pytest.fixture
def schedule():
    return programs.deepspeed().runtime.pipe.schedule


def texts(steps):
    return [" ".join(map(repr, step)) for step in steps]


def test_training_by_hand(schedule):
    first = schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=0)
    assert texts(first) == [
        "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
        "SendActivation(buffer_id=0)",
        "LoadMicroBatch(buffer_id=1) ForwardPass(buffer_id=1)",
        "RecvGrad(buffer_id=0) SendActivation(buffer_id=1) BackwardPass(buffer_id=0)",
        "",
        "RecvGrad(buffer_id=1) BackwardPass(buffer_id=1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]
    last = schedule.TrainSchedule(micro_batches=2, stages=2, stage_id=1)
    assert texts(last) == [
        "",
        "RecvActivation(buffer_id=0) LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
        "BackwardPass(buffer_id=0)",
        "SendGrad(buffer_id=0) RecvActivation(buffer_id=1) LoadMicroBatch(buffer_id=1) ForwardPass(buffer_id=1)",
        "BackwardPass(buffer_id=1)",
        "SendGrad(buffer_id=1) ReduceTiedGrads() ReduceGrads() OptimizerStep()",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micros", [1, 2, 5, 8])
def test_both_neighbours_agree_in_every_step(schedule, stages, micros):
    """A send meets its receive in one step, in the order of the two, and buffers are free when they are taken."""
    rows = [list(schedule.TrainSchedule(micros, stages, stage)) for stage in range(stages)]
    assert {len(row) for row in rows} == {2 * (micros + stages - 1)}
    for step in zip(*rows, strict=True):
        for here, there in zip(step, step[1:], strict=False):
            down = [type(one).__name__ for one in here if isinstance(one, schedule.SendActivation | schedule.RecvGrad)]
            up = [type(one).__name__ for one in there if isinstance(one, schedule.RecvActivation | schedule.SendGrad)]
            pairs = {"SendActivation": "RecvActivation", "RecvGrad": "SendGrad"}
            assert [pairs[name] for name in down] == up
    for stage, row in enumerate(rows):
        made = schedule.TrainSchedule(micros, stages, stage)
        assert made.num_pipe_buffers() == max(2, min(stages - stage, micros))
        kept = set()
        for one in (each for step in row for each in step):
            if isinstance(one, schedule.ForwardPass):
                assert one.buffer_id not in kept
                kept.add(one.buffer_id)
            elif isinstance(one, schedule.BackwardPass):
                kept.remove(one.buffer_id)
        assert not kept
    assert schedule.TrainSchedule.table(micros, stages).rows == make_schedule("1f1b", stages, micros).rows


def test_inference_and_data_parallel(schedule):
    rows = [texts(schedule.InferenceSchedule(2, 2, stage)) for stage in (0, 1)]
    assert rows == [
        [
            "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0)",
            "LoadMicroBatch(buffer_id=1) SendActivation(buffer_id=0) ForwardPass(buffer_id=1)",
            "SendActivation(buffer_id=1)",
        ],
        [
            "",
            "LoadMicroBatch(buffer_id=0) RecvActivation(buffer_id=0) ForwardPass(buffer_id=0)",
            "LoadMicroBatch(buffer_id=1) RecvActivation(buffer_id=1) ForwardPass(buffer_id=1)",
        ],
    ]
    assert schedule.InferenceSchedule.table(3, 2).is_forward_only
    alone = schedule.DataParallelSchedule(2, 1, 0)
    one = "LoadMicroBatch(buffer_id=0) ForwardPass(buffer_id=0) BackwardPass(buffer_id=0)"
    assert texts(alone) == [one, f"{one} ReduceGrads() OptimizerStep()"] and alone.num_pipe_buffers() == 1


def test_a_schedule_of_a_script_s_own(schedule):
    class AllForwardFirst(schedule.PipeSchedule):
        def steps(self):
            for micro in range(self.micro_batches):
                yield [schedule.ForwardPass(micro, note="mine")]
            for micro in range(self.micro_batches):
                yield [schedule.BackwardPass(micro)]

    made = AllForwardFirst(micro_batches=3, stages=2, stage_id=0)
    assert (made.num_micro_batches, made.num_stages, made.stage, made.num_pipe_buffers()) == (3, 2, 0, 3)
    assert made.is_first_stage and not made.is_last_stage and next(iter(made))[0].note == "mine"
    assert AllForwardFirst.table(3, 2).rows == make_schedule("gpipe", 2, 3).rows
    with pytest.raises(TypeError, match="abstract"):
        schedule.PipeSchedule(1, 1, 0)


def test_a_backward_without_its_forward_is_refused(schedule):
    class Backwards(schedule.PipeSchedule):
        def steps(self):
            yield [schedule.BackwardPass(0)]

    with pytest.raises(PlanError, match=r"Backwards, stage 0: BackwardPass\(buffer_id=0\) before a ForwardPass"):
        Backwards.table(1, 1)


def test_parts_of_layers():
    tools = programs.deepspeed().runtime.utils
    assert tools.partition_uniform(7, 3) == [0, 3, 5, 7] and tools.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert tools.partition_balanced([9, 1, 1, 1], 2) == [0, 1, 4] and tools.partition_balanced([1], 2) == [0, 1, 1]


def test_topologies_are_mizzen_s():
    package = programs.deepspeed()
    topology = package.runtime.pipe.topology
    assert package.pipe.ProcessTopology is topology.ProcessTopology
    assert topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).get_rank(pipe=1, data=0, model=1) == 5
    assert topology.PipelineParallelGrid.__module__ == "mizzen.comm.grid"


def by_hand():
    deepspeed = programs.deepspeed()
    deepspeed.init_distributed("gloo")
    p2p, topology = deepspeed.runtime.pipe.p2p, deepspeed.runtime.pipe.topology
    with pytest.raises(UsageError, match=r"before init_process_groups\(grid\)"):
        p2p.send(torch.zeros(1), 1)
    grid = topology.PipelineParallelGrid(topology.PipeDataParallelTopology(num_pp=4, num_dp=1))
    p2p.init_process_groups(grid)
    assert p2p.can_send_recv()
    stage, found = grid.get_stage_id(), torch.zeros(2)
    after, before = (stage + 1) % 4, (stage - 1) % 4
    p2p.send(torch.full((2,), float(stage)), after, async_op=True)
    p2p.recv(found, before)
    p2p.wait()
    said = None
    if stage == 0:
        p2p.send_obj({"layers": [1, 2], "loss": torch.tensor(0.5)}, 3)
    elif stage == 3:
        said = p2p.recv_obj(0)
    with pytest.raises(UsageError, match="stage . sends to and receives from the stages beside it"):
        p2p.send(found, (stage + 2) % 4)
    return found.tolist(), said


def test_messages_between_stages_by_hand(world):
    outcomes = world(4).run(by_hand)
    assert [found for found, _ in outcomes] == [[3.0, 3.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert outcomes[3][1] == {"layers": [1, 2], "loss": torch.tensor(0.5)}


def test_what_the_engine_of_pipelines_has_beside_itself():
    engine = programs.deepspeed().runtime.pipe.engine
    assert engine.is_even(4) and not engine.is_even(3)
    assert (engine.LOG_STAGE, engine.BATCH_INPUT_TIMER, engine.mem_alloced) == (-2, "batch_input", 0)


def staged():
    deepspeed = programs.deepspeed()
    torch.manual_seed(1)
    layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {"train_batch_size": 6, "gradient_accumulation_steps": 3, "steps_per_print": 1000}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 3))
    stage = (
        engine.stage_id,
        engine.num_stages,
        engine.micro_batches,
        engine.is_pipe_parallel,
        engine.pipeline_parallelism,
    )
    return float(loss), stage, isinstance(engine, deepspeed.runtime.pipe.engine.PipelineEngine)


def test_an_engine_of_a_pipeline_says_where_it_is(world):
    first, second = world(2).run(staged)
    assert first[0] == second[0] > 0 and first[2]
    assert (first[1], second[1]) == ((0, 2, 3, True, True), (1, 2, 3, True, True))
