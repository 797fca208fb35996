"""Every command in docs/migrate.md runs and prints what the page says, `...` standing for any text or lines."""

import shlex
import shutil

import pytest

from launches import ROOT, environment
from pages import block, commands, is_as_shown

PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf8")
COMMANDS = commands(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for the whole page: a command may need what one before it has left."""
    made = tmp_path_factory.mktemp("migrate")
    (made / "train.py").write_text(block(PAGE, "python"))
    (made / "experts.py").write_text(block(PAGE, "py"))
    (made / "config.json").write_text(block(PAGE, "json"))
    shutil.copytree(ROOT / "tests" / "fixtures" / "deepspeed" / "zero2", made / "theirs")
    return made


@pytest.mark.wide
def test_the_commands_print_what_the_page_shows_and_leave_what_clients_look_for(python, folder):
    for line, shown in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "mizzen"
        ran = python("-m", "mizzen.cli", *words, cwd=folder, env=environment())
        is_refused = "NotBuilt" in shown
        assert ran.returncode == (1 if is_refused else 0), ran.stdout + ran.stderr
        if is_refused:
            assert is_as_shown(f"...\n{shown}", ran.stdout + ran.stderr), ran.stderr
        else:
            assert is_as_shown(shown, ran.stdout), ran.stdout
    assert {path.name for path in (folder / "checkpoints" / "global_step20").glob("*.pt")} == {
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    }
    assert (folder / "checkpoints" / "zero_to_fp32.py").is_file()


def test_every_program_is_on_the_page():
    points = next((ROOT / "src" / "mizzen" / "drop_in").glob("*.dist-info/entry_points.txt")).read_text()
    names = {line.split(" = ")[0] for line in points.splitlines()[1:]} - {"deepspeed.pt", "dsr"}
    assert all(f"`{name}`" in PAGE for name in names)
