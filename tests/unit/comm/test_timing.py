"""The log of collectives: what is wanted, the bandwidths, the tables."""

import json
import re

import pytest
import torch

from mizzen.ambient import AMBIENT
from mizzen.comm.report import comm_log, configure
from mizzen.comm.timing import (
    COLUMNS,
    STRAGGLER_COLUMNS,
    CommLog,
    Timing,
    bandwidth,
    in_words,
    message_size,
    table,
    trimmed_mean,
)
from mizzen.config import load
from mizzen.config.observe import CommsLoggerConfig
from mizzen.errors import ConfigError

GIVEN = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["all_reduce"]}


@pytest.fixture
def configured(monkeypatch):
    """What the log is told by a call of `configure`."""
    monkeypatch.setattr(AMBIENT, "comm_log", None)

    def call(*args, **kwargs):
        configure(*args, **kwargs)
        return comm_log().settings

    return call


@pytest.mark.parametrize(
    "config",
    [
        load({"comms_logger": GIVEN}).comms_logger,
        load({"comms_logger": GIVEN}),
        {"comms_logger": GIVEN},
        GIVEN,
    ],
    ids=["section", "config", "dict", "dict of the section"],
)
def test_settings_come_from_a_configuration_in_any_form(configured, config):
    assert configured(config) == CommsLoggerConfig(**GIVEN)
    assert configured(verbose=False, prof_ops=["barrier"]).prof_ops == ("barrier",)
    assert configured() == CommsLoggerConfig(**GIVEN | {"verbose": False, "prof_ops": ["barrier"]})


def test_settings_come_from_a_file(configured, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": "auto", "comms_logger": GIVEN}))
    assert (
        configured(tmp_path / "config.json") == configured(str(tmp_path / "config.json")) == CommsLoggerConfig(**GIVEN)
    )


def test_the_section_alone_enables_nothing(configured):
    assert not configured({"comms_logger": {"verbose": True}}).enabled
    assert not configured({"train_batch_size": 8}).enabled
    assert not configured({}).enabled


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"comms_logger": {"enabld": True}}, "comms_logger.enabld: unknown key; did you mean 'enabled'?"),
        ({"comms_logger": {"enabled": "yes"}}, "comms_logger.enabled: "),
        ({"comms_logger": True}, "comms_logger: true is not an object of keys"),
        ({"prof_ops": "all_reduce"}, "comms_logger.prof_ops: "),
        ({"prof_opps": ["all_reduce"]}, "comms_logger.prof_opps: unknown key; did you mean 'prof_ops'?"),
        ("/no/such/file.json", "'/no/such/file.json' is neither an existing file"),
        (object(), "a configuration is a dict, a path, or text; this is a object"),
    ],
)
def test_wrong_settings_are_named_by_their_path(configured, config, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        configured(config)


def test_wrong_arguments_are_named_as_keys(configured):
    with pytest.raises(ConfigError, match=r"comms_logger\.prof_ops: 3 is not a list"):
        configured(prof_ops=3)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (CommsLoggerConfig(), False),
        (CommsLoggerConfig(enabled=True), True),
        (CommsLoggerConfig(enabled=True, prof_all=False), False),
        (CommsLoggerConfig(enabled=True, prof_all=False, prof_ops=("all_reduce",)), True),
        (CommsLoggerConfig(enabled=True, prof_all=False, prof_ops=("mine",)), True),
        (CommsLoggerConfig(enabled=False, prof_ops=("all_reduce",)), False),
    ],
)
def test_what_is_wanted(settings, wanted):
    assert bool(CommLog(settings).name_for("all_reduce", log_name="mine")) is wanted


def test_one_call_can_ask_to_be_logged():
    log = CommLog(CommsLoggerConfig(enabled=True, prof_all=False))
    assert log.name_for("all_reduce", prof=True) == "all_reduce"
    assert CommLog(CommsLoggerConfig(enabled=False)).name_for("all_reduce", prof=True) == ""


def test_debug_names_the_caller():
    log = CommLog(CommsLoggerConfig(enabled=True, debug=True))
    assert log.name_for("all_reduce") == "all_reduce | [Caller Func: test_debug_names_the_caller]"
    assert log.name_for("all_reduce", debug="the_optimizer") == "all_reduce | [Caller Func: the_optimizer]"


@pytest.mark.parametrize(
    ("operation", "ranks", "algorithm", "bus"),
    [
        ("all_reduce", 4, 16.0, 12.0),
        ("inference_all_reduce", 2, 16.0, 8.0),
        ("all_gather_into_tensor", 4, 8.0, 6.0),
        ("all_gather", 2, 8.0, 4.0),
        ("reduce_scatter_tensor", 4, 8.0, 6.0),
        ("all_to_all_single", 4, 8.0, 6.0),
        ("broadcast", 4, 8.0, 8.0),
        ("reduce", 4, 8.0, 8.0),
        ("send", 4, 8.0, 8.0),
        ("all_reduce", 1, 16.0, 0.0),
    ],
)
def test_bandwidth_depends_on_the_size_of_the_group(operation, ranks, algorithm, bus):
    assert bandwidth(operation, milliseconds=1.0, size=1_000_000, ranks=ranks) == pytest.approx((algorithm, bus))


def test_no_time_is_no_bandwidth():
    assert bandwidth("barrier", milliseconds=0.0, size=0, ranks=4) == (0.0, 0.0)


def test_a_gather_counts_every_shard():
    assert message_size("all_gather_into_tensor", 100, 4) == 400
    assert message_size("reduce_scatter", 100, 4) == 400
    assert message_size("all_reduce", 100, 4) == 100
    assert message_size("gather", 100, 4) == 100


def test_a_tenth_is_trimmed_at_either_end():
    assert trimmed_mean([1000.0, *[1.0] * 18, -500.0]) == 1.0
    assert trimmed_mean([1.0, 2.0, 6.0]) == 3.0
    assert trimmed_mean([]) == 0.0


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (5 << 20, "5 MB"), (1 << 52, "4 PB")]
)
def test_sizes_in_words(size, words):
    assert in_words(size) == words


def filled():
    log = CommLog(CommsLoggerConfig(enabled=True))
    for milliseconds in (1.0, 3.0):
        log.add("all_reduce", "all_reduce", milliseconds=milliseconds, size=1_000_000, ranks=2)
    log.add("all_reduce", "all_reduce", milliseconds=0.5, size=2048, ranks=2)
    log.add("my gather", "all_gather", milliseconds=2.0, size=512, ranks=4)
    return log


def test_a_summary_has_a_row_per_size():
    summary = filled().summary()
    assert list(summary) == ["all_reduce", "my gather"]
    assert list(summary["all_reduce"]) == [2048, 1_000_000]
    assert summary["all_reduce"][1_000_000] == {
        "count": 2,
        "total_latency_ms": 4.0,
        "avg_latency_ms": 2.0,
        "tput_avg_gbps": pytest.approx((16 + 16 / 3) / 2),
        "busbw_avg_gbps": pytest.approx((8 + 8 / 3) / 2),
        "msg_size_bytes": 1_000_000,
        "msg_size_str": "976.56 KB",
    }
    assert list(summary["my gather"]) == [2048]
    assert filled().get_operation_summary("none such") == {}


def test_the_table_is_aligned():
    lines = table(filled().summary(), COLUMNS).splitlines()
    assert lines[0].split("  ")[0] == "Comm. Op"
    assert all(column in lines[0] for column in COLUMNS)
    assert [line.split()[0] for line in lines[1:]] == ["all_reduce", "2", "976.56", "my", "2"]
    assert lines[3][lines[0].index("CallCount") :].split() == ["2", "4.00", "2.00", "10.67", "5.33"]


def test_stragglers_are_measured_against_the_fastest():
    log = filled()
    others = {("all_reduce", 1_000_000): 1, ("all_reduce", 2048): 1, ("only there", 8): 3}

    def reduce_min(values):
        values.copy_(torch.minimum(values, torch.tensor([0.25, 0.75], dtype=torch.float64)))

    found = log.stragglers(lambda mine: [mine, others], reduce_min)
    assert list(found) == ["all_reduce"]
    assert found["all_reduce"][2048]["total_straggler_ms"] == 0.25
    row = found["all_reduce"][1_000_000]
    assert (row["count"], row["total_comm_lat_ms"], row["total_straggler_ms"]) == (1, 0.75, 0.25)
    assert "Total straggler(ms)" in table(found, STRAGGLER_COLUMNS).splitlines()[0]


def test_nothing_in_common_needs_no_reduction():
    def never(values):
        raise AssertionError

    assert filled().stragglers(lambda mine: [mine, {}], never) == {}


def test_profiling_is_switched_at_any_time():
    log = CommLog(CommsLoggerConfig(enabled=True))
    log.stop_profiling_comms()
    log.start_profiling_op(["barrier", "barrier", "send"])
    assert [bool(log.name_for(name)) for name in ("barrier", "all_reduce")] == [True, False]
    log.stop_profiling_op(["barrier"])
    assert log.settings.prof_ops == ("send",)
    log.start_profiling_comms()
    assert log.name_for("all_reduce")


def test_reset_forgets():
    log = filled()
    assert set(log.get_raw_data()) == {"all_reduce", "my gather"}
    log.reset()
    assert log.summary() == {}


def test_a_timing_counts_bytes_and_needs_no_payload():
    log = CommLog(CommsLoggerConfig(enabled=True))
    Timing(log, "x", "all_reduce", (torch.ones(8), torch.ones(2, dtype=torch.int64)), 2).stop()
    Timing(log, "barrier", "barrier", (), 2).stop()
    assert list(log.summary()["x"]) == [48]
    assert log.summary()["barrier"][0]["count"] == 1


def test_verbose_says_a_line_for_each_whatever_the_level_of_messages_is(capsys):
    log = CommLog(CommsLoggerConfig(enabled=True, verbose=True))
    log.add("all_reduce", "all_reduce", milliseconds=2.0, size=1_000_000, ranks=2)
    assert capsys.readouterr().out == (
        "comm op: all_reduce | time (ms): 2.00 | msg size: 976.56 KB | algbw (Gbps): 8.00 | busbw (Gbps): 4.00\n"
    )
