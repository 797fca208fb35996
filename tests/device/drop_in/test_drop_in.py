"""The drop-in on an accelerator: its wide face of the device, and an engine with an optimizer under another name."""

import torch

from drop_in import programs


def test_the_accelerator_answers_for_the_device(device):
    accelerator = programs.deepspeed().get_accelerator()
    assert accelerator.device_name() == device.type and accelerator.device_count() >= 1
    tensor = accelerator.FloatTensor([1.0, 2.0])
    assert accelerator.on_accelerator(tensor) and accelerator.memory_allocated() > 0
    assert accelerator.max_memory_allocated() >= accelerator.memory_allocated()
    assert accelerator.total_memory() >= accelerator.available_memory() > 0
    stream, begin, end = accelerator.Stream(), *(accelerator.Event(enable_timing=True) for _ in range(2))
    with accelerator.stream(stream):
        begin.record()
        tensor.mul_(2)
        end.record()
    accelerator.synchronize()
    assert begin.elapsed_time(end) >= 0 and tensor.tolist() == [2.0, 4.0]
    assert accelerator.is_pinned(accelerator.pin_memory(torch.ones(3)))
    accelerator.range_push("range")
    accelerator.range_pop()


def test_an_engine_trains_with_a_fused_optimizer():
    package = programs.deepspeed()
    from deepspeed.ops.adam import FusedAdam

    torch.manual_seed(0)
    model = programs.Model()
    settings = programs.config(2, bf16={"enabled": True})
    del settings["optimizer"]
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=settings)
    data = iter([batch.bfloat16() for batch in programs.batches(20)])
    losses = [engine.train_batch(data) for _ in range(20)]
    assert all(loss.device.type == engine.device.type for loss in losses)
    assert losses[-1] < losses[0]
    engine.destroy()
