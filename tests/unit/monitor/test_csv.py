import csv

import pytest

from mizzen.config.observe import CsvConfig
from mizzen.monitor.csv import MOST_OPEN, CsvSink


@pytest.fixture
def sink(tmp_path):
    return lambda: CsvSink(CsvConfig(output_path=str(tmp_path), job_name="job"))


def test_a_file_for_each_number_with_its_last_name_as_the_header(sink, tmp_path):
    first = sink()
    first.write([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 2.5, 8)])
    first.write([("Train/Samples/lr", 0.25, 16), ("plain name", float("nan"), 16)])
    assert {path.name: path.read_text() for path in (tmp_path / "job").iterdir()} == {
        "Train_Samples_lr.csv": "step,lr\n8,0.5\n16,0.25\n",
        "Train_Samples_train_loss.csv": "step,train_loss\n8,2.5\n",
        "plain_name.csv": "step,plain name\n16,nan\n",
    }


def test_a_resumed_run_appends_without_a_second_header(sink, tmp_path):
    for samples in (8, 16):
        run = sink()
        run.write([("lr", 0.5, samples)])
        run.flush()
        run.close()
    assert (tmp_path / "job" / "lr.csv").read_text() == "step,lr\n8,0.5\n16,0.5\n"


def test_numbers_for_very_many_names_do_not_use_up_the_files_of_the_process(sink, tmp_path):
    many = sink()
    for samples in (8, 16):
        many.write([(f"norm/{layer}", 1.0, samples) for layer in range(2 * MOST_OPEN)])
    assert len(many._files) == MOST_OPEN
    assert all(path.read_text().endswith("\n8,1.0\n16,1.0\n") for path in (tmp_path / "job").iterdir())
    assert len(list((tmp_path / "job").iterdir())) == 2 * MOST_OPEN
    many.close()
    assert many._files == {}


def test_a_name_with_a_comma_is_one_column(sink, tmp_path):
    sink().write([('a "b", c', 1.0, 8)])
    [path] = (tmp_path / "job").iterdir()
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["step", 'a "b", c'], ["8", "1.0"]]


def test_without_a_path_the_files_are_in_csv_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CsvSink(CsvConfig()).write([("lr", 1.0, 8)])
    assert (tmp_path / "csv_logs" / "DeepSpeedJobName" / "lr.csv").exists()
