import pytest

from mizzen.config.resolve import resolve
from mizzen.environment import World
from mizzen.monitor.printer import Lines, Printer, dump_state, is_milestone
from mizzen.monitor.screen import Screen


@pytest.fixture
def said(capsys):
    return lambda: capsys.readouterr().err.splitlines()


@pytest.fixture
def printer(memory):
    return lambda **lines: Printer(Screen(), memory, Lines(**lines))


def test_milestones_get_rarer():
    assert [count for count in range(1, 2001) if is_milestone(count)] == [1, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert sum(map(is_milestone, range(1, 1_000_001))) == 17


def test_a_line_at_each_milestone_with_the_loss_read_only_there(printer, said, step):
    reads = []
    lines = printer()
    for number in range(1, 101):
        lines.on_step(step(number, loss=lambda number=number: reads.append(number) or 1 / number))
    assert reads == [1, 10, 20, 50, 100]
    assert [line.split(",")[0] for line in said()] == [f"mizzen: step={number}" for number in reads]


def test_a_resumed_run_starts_its_milestones_again(printer, said, step):
    lines = printer()
    for number in range(5_001, 5_021):
        lines.on_step(step(number))
    assert [line.split(",")[0] for line in said()] == [f"mizzen: step={number}" for number in (5001, 5010, 5020)]


def test_an_interval_is_kept_exactly(printer, said, step):
    lines = printer(every=3)
    for number in range(1, 11):
        lines.on_step(step(number))
    assert [line.split(",")[0] for line in said()] == ["mizzen: step=3", "mizzen: step=6", "mizzen: step=9"]


def test_the_line_has_the_known_names_and_our_numbers(printer, said, step):
    lines = printer(every=2, loss_scale=True)
    fields = {"lr": (1e-3, 5e-4), "momentum": ((0.9, 0.95), None), "loss_scale": 65536.0, "skipped_steps": 1}
    lines.on_step(step(1, seconds=60.0, tokens=1024, **fields))
    lines.on_step(step(2, seconds=0.5, tokens=1024, **fields))
    assert said() == [
        "mizzen: step=2, skipped=1, lr=[0.001, 0.0005], mom=[(0.9, 0.95), None], loss=2.5, grad_norm=1.5, "
        "loss_scale=65536, samples_per_sec=16.00, tokens_per_sec=2048.00, memory=2.00 GiB"
    ]


def test_what_is_not_known_or_not_wanted_is_left_out(printer, said, step):
    lines = printer(every=1, rate=False)
    for number in (1, 2):
        lines.on_step(step(number, loss=None, norm=None))
    assert said()[-1] == "mizzen: step=2, skipped=0, lr=[0.001], memory=2.00 GiB"


def test_a_skipped_step_repeats_no_line(printer, said, step):
    lines = printer(every=10)
    lines.on_step(step(10))
    lines.on_step(step(10, reason="step 11: not finite"))
    lines.close()
    assert len(said()) == 1


def test_rates_are_those_since_the_last_line(printer, said, step):
    lines = printer(every=2)
    for number in range(1, 5):
        lines.on_step(step(number, seconds=8.0 if number < 3 else 2.0))
    assert ["samples_per_sec=1.00" in line for line in said()] == [True, False]
    lines.on_step(step(5, seconds=1.0))
    lines.on_step(step(6, seconds=1.0))
    assert "samples_per_sec=8.00" in said()[0]


def test_breakdowns_of_time_and_memory(printer, said, step):
    lines = printer(every=2, progress=False, phases=True, memory=True)
    for number in (1, 2):
        phases = {"forward": 0.001 * number, "backward": 0.004, "step": 0.0005}
        lines.on_step(step(number, phases=phases, loss=lambda: pytest.fail("read")))
    assert said() == [
        "mizzen: time (ms) | forward: 1.50 | backward: 4.00 | step: 0.50",
        "mizzen: memory | allocated: 2.00 GiB | reserved: 3.00 GiB | peak: unknown",
    ]


def test_without_timed_phases_there_is_no_line_of_them(printer, said, step):
    printer(every=1, progress=False, phases=True).on_step(step(1))
    assert said() == []


def test_the_configuration_is_dumped_on_rank_0_when_asked_without_keys_to_services(config, said):
    settings = resolve(config(dump_state=True, comet={"enabled": True, "api_key": "secret"}), 4).config
    dump_state(settings, World(rank=1, size=4))
    assert said() == []
    dump_state(settings, World(rank=0, size=4))
    lines = said()
    assert lines[0] == "mizzen: configuration, without defaults"
    found = {line.split()[0]: line.split()[1:3] for line in lines[1:]}
    assert found["train_batch_size"] == ["8", "given"]
    assert found["train_micro_batch_size_per_gpu"] == ["2", "derived"]
    assert "comet.enabled" in found and "secret" not in "".join(lines)
    dump_state(config(), World())
    assert said() == []


def test_the_share_of_the_device_is_printed_where_it_is_known(printer, said, step):
    lines = printer(every=1)
    lines.on_step(step(1, measures={"mfu": 0.9}))  # not timed
    lines.on_step(step(2, measures={"mfu": 0.4123}))
    first, second = said()
    assert "mfu" not in first and "samples_per_sec=16.00, mfu=41.2%, memory" in second
