from mizzen.monitor.screen import Screen
from mizzen.monitor.skips import SkippedSteps


def test_a_skipped_step_is_said_with_its_reason(step, warned):
    skips = SkippedSteps(Screen())
    skips.on_step(step(4))
    skips.on_step(step(4, reason="step 5: gradient not finite on rank 1: head.weight", skipped_steps=3))
    skips.on_step(step(4, reason="accumulating"))
    skips.close()
    assert warned == ["skipped step 5: gradient not finite on rank 1: head.weight; 3 skipped so far"]


def test_the_loss_scale_is_said_where_there_is_one(step, warned):
    SkippedSteps(Screen()).on_step(step(0, reason="step 1: overflow", skipped_steps=1, loss_scale=65536.0))
    assert warned == ["skipped step 1: overflow; 1 skipped so far, loss scale 65536"]


def test_the_first_ten_one_by_one_then_every_hundredth(step, warned):
    skips = SkippedSteps(Screen())
    for count in range(1, 351):
        skips.on_step(step(0, reason="step 1: overflow", skipped_steps=count))
    counts = [int(text.split("; ")[1].split()[0]) for text in warned]
    assert counts == [*range(1, 11), 100, 200, 300]
    assert [text for text in warned if "from here on only every 100th is said" in text] == [warned[9]]


def test_the_passing_line_gives_way(step, warned, terminal):
    seen = terminal()
    screen = Screen()
    screen.show("line")
    SkippedSteps(screen).on_step(step(0, reason="step 1: overflow"))
    assert seen().startswith("line\r\x1b[2K") and len(warned) == 1
