"""Samples of stacks, and whose they are."""

import pytest
from bench.own_time import main, read, render

STACKS = """\
main (script.py:1);Engine.step (mizzen/engine/engine.py:90) 3
main (script.py:1);Engine.step (mizzen/engine/engine.py:90);at::add (libtorch_cpu.so) 2
main (script.py:1);Engine.step (mizzen/engine/engine.py:91);Adam.step (torch/optim/adam.py:7);add (libtorch.so) 4
start (libc.so.6) 1
"""


def test_the_innermost_python_function_counts():
    found = read(STACKS.splitlines())
    assert found.total == 10
    assert dict(found.python) == {"Engine.step (mizzen/engine/engine.py:90)": 3}
    assert dict(found.torch) == {"Engine.step (mizzen/engine/engine.py:90)": 2}
    text = render("mizzen-0", found, 20.0)
    assert "the engine's own Python 6.00 ms, torch called by it 4.00 ms" in text
    assert "| Engine.step (mizzen/engine/engine.py:90) |     6.000 |    4.000 |" in text


def test_without_its_instrument_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "pip install py-spy" in capsys.readouterr().err
