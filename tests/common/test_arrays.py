"""Arrays in files of results: bit for bit what was written, in a small file, and a damaged one is named."""

import json
import struct

import numpy as np
import pytest

from mxd import Run
from mxd.common.arrays import packed
from mxd.common.errors import MxdError
from mxd.common.files import write_json
from mxd.evaluation.checkpoints import save_results
from mxd.report.source import read_document

UNITS = 262_144


def written(folder, rates):
    write_json(folder / "units.json", {"results": {"a": {"rates": rates}}}, packed)
    return folder / "units.json"


def test_numbers_come_back_bit_for_bit(tmp_path):
    """By the standard library: of each number its four bytes, the lowest first."""
    values = [0.1, -0.0, 1e-45, 3.4e38, float("inf"), float("nan"), 1 / 3]
    units = [0, 7, 262_143, -1]
    floats, numbers = np.array(values, np.float32), np.array(units, np.int32)
    save_results({"results": {"big-endian": floats.astype(">f4"), "rates": floats, "units": numbers}}, tmp_path / "u")
    stored = json.loads((tmp_path / "u").read_text())["results"]
    assert stored["rates"]["dtype"] == "<f4" and stored["rates"]["length"] == 7 and stored["units"]["dtype"] == "<i4"
    (tmp_path / "u").rename(tmp_path / "units.json")
    found = Run(tmp_path).results["units"]["results"]
    assert found["rates"].tobytes() == struct.pack("<7f", *values) == found["big-endian"].tobytes()
    assert found["units"].tolist() == units and found["units"].dtype == np.int32
    nodes = read_document(tmp_path / "units.json", "units.json")["results"]
    assert nodes["units"].numbers() == [0.0, 7.0, 262_143.0, -1.0]
    assert nodes["rates"].numbers()[::6] == [struct.unpack("<f", struct.pack("<f", v))[0] for v in (0.1, 1 / 3)]


def test_an_object_that_only_looks_like_an_array_stays_one(tmp_path):
    assert read_document(written(tmp_path, {"base64": 3, "law": 4}), "u")["results"].value["a"]["rates"]["law"] == 4


def test_a_file_with_lists_reads_as_before(tmp_path):
    path = written(tmp_path, [0.1, 0.25])
    assert read_document(path, "u")["results"]["a"]["rates"].numbers() == [0.1, 0.25]
    results = Run(tmp_path).results
    assert results["units"]["results"]["a"]["rates"] == [0.1, 0.25]
    assert "whole" not in results and results.get("whole") is None
    with pytest.raises(MxdError, match="'whole' is not measured yet; there are answers to: units"):
        results["whole"]


def test_three_numbers_of_262_144_units_take_little_over_four_bytes_each(tmp_path):
    rates = np.random.default_rng(0).random(UNITS, np.float32)
    path = written(tmp_path, {"rates": rates, "means": rates, "maxima": rates})
    assert path.stat().st_size < 3 * (UNITS * 16 // 3 + 100) + 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base64": "AAAAAAAA"}, "a damaged array: 6 bytes, expected 8"),
        ({"base64": "AAAA?AAAAAA="}, "a damaged array: Only base64 data is allowed"),
        ({"base64": "AAAAé"}, "a damaged array: "),
        ({"base64": ["AAAA"]}, "an array of 2 numbers of type '<f4'; expected <f4 or <i4"),
        ({"dtype": "|O"}, r"an array of 2 numbers of type '\|O'; expected <f4 or <i4"),
        ({"length": 3}, "a damaged array: 8 bytes, expected 12"),
        ({"length": True}, "an array of True numbers"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, change, said):
    array = packed(np.zeros(2, np.float32)) | change
    path = written(tmp_path, array)
    for read in (lambda: read_document(path, "units.json"), lambda: Run(tmp_path).results):
        with pytest.raises(MxdError, match=rf"^cannot read .*units\.json: it holds {said}") as error:
            read()
        assert "\n" not in str(error.value)


def test_what_cannot_be_stored_exactly_is_refused():
    for values in (np.zeros(2), np.zeros((2, 2), np.float32), np.zeros(2, np.int64)):
        with pytest.raises(TypeError, match="expected float32 or int32"):
            packed(values)
