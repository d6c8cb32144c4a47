"""The profiles that ship with Heddle, and users' own."""

import re
from pathlib import Path

import pytest

from engines.profiles import load_profile, profile_names

OWN = """
gpu = "l4"
slots_per_gpu = 10
source = "my own measurement"
[overhead_ms]
base = 1.0
per_sequence = 0.0
[models.mine]
model = "me/mine"
kv_bytes_per_token = 1000
engines = [{ tp = 2, kernel_ms = [5.0, 0.1, 0.2], prefill_ms = [10.0, 0.5], kv_capacity_tokens = 5000 }]
"""


def test_every_built_in_profile_is_sane_and_names_its_source() -> None:
    """In every family, an engine with more GPUs decodes one sequence no slower and holds no less KV."""
    families: dict[str, list[str]] = {}
    for name in profile_names():
        families.setdefault(name.rpartition("-tp")[0], []).append(name)
    assert {"qwen3-14b-h100", "qwen3-32b-a100", "toy-cpu"} <= set(families)
    for family in families.values():
        profiles = sorted((load_profile(name) for name in family), key=lambda p: p.tp)
        for profile in profiles:
            assert profile.source and profile.slots > 0
        steps = [profile.decode_step_s(1, 2000) for profile in profiles]
        capacities = [profile.kv_capacity_tokens for profile in profiles]
        assert steps == sorted(steps, reverse=True)
        assert capacities == sorted(capacities)


def test_engine_overhead_is_part_of_a_decode_step() -> None:
    """Kernel time plus the engine's overhead: 11.05 + 1.13 and 0.0118 + 0.031 ms."""
    profile = load_profile("qwen3-14b-h100-tp1")
    assert profile.decode_base_ms == pytest.approx(12.18)
    assert profile.decode_per_sequence_ms == pytest.approx(0.0428)
    assert profile.slots == 100
    assert load_profile("qwen3-14b-h100-tp4").slots == 400


def test_an_unknown_profile_name_suggests_similar_ones() -> None:
    """So that a typing error is obvious."""
    with pytest.raises(ValueError, match=r"'qwen3-14b-h100'.*qwen3-14b-h100-tp1"):
        load_profile("qwen3-14b-h100")


@pytest.mark.parametrize("name", ["mine.toml", "mine.toml-tp2"])
def test_a_file_without_the_name_of_a_profile_is_refused_with_the_form(name: str) -> None:
    """`-tpN` is what a fleet of `gpus` and `tp` adds. All built-in names were listed."""
    with pytest.raises(ValueError, match=r"one of your own is FILE\.toml:NAME"):
        load_profile(name)


def test_a_users_profile_is_loaded_by_path_and_name(tmp_path: Path) -> None:
    """`path.toml:name`, in the form of the built-in files."""
    path = tmp_path / "mine.toml"
    path.write_text(f"\ufeff{OWN}")  # a byte order mark, with which some editors begin a file
    profile = load_profile(f"{path}:mine-l4-tp2")
    assert (profile.slots, profile.decode_base_ms, profile.kv_capacity_tokens) == (20, 6.0, 5000)


def test_a_base_that_a_fit_left_at_0_is_read_as_more(tmp_path: Path) -> None:
    """If sequences cost most of a step, noise may leave nothing for the base. Placement divides by it."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace("base = 1.0", "base = 0.0").replace("[5.0, 0.1", "[0.0, 8.0"))
    profile = load_profile(f"{path}:mine-l4-tp2")
    assert profile.decode_base_ms > 0
    assert profile.decode_step_s(1, 0) == pytest.approx(0.008, rel=0.001)


def test_a_malformed_profile_file_is_reported_in_one_line(tmp_path: Path) -> None:
    """Without a traceback from the parser."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace("kv_bytes_per_token = 1000\n", ""))
    with pytest.raises(ValueError, match="'kv_bytes_per_token' is missing"):
        load_profile(f"{path}:mine-l4-tp2")
    with pytest.raises(ValueError, match="No such file"):
        load_profile(f"{tmp_path}/absent.toml:mine")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("slots_per_gpu = 10", "slots_per_gpu = 0", "mine-l4-tp2: slots: must be a finite number from 1, not 0"),
        ("slots_per_gpu = 10", "slots_per_gpu = inf", "infinity"),
        ("tp = 2", "tp = -2", "tp: must be a finite number from 1, not -2"),
        ("= 5000", "= 0", "kv_capacity_tokens: must be a finite number from 1, not 0"),
        ("[5.0", "[-5.0", "decode_base_ms: must be a finite number from 0, not -4.0"),
        ("[5.0", "[nan", "decode_base_ms: must be a finite number from 0, not nan"),
        ("0.2]", "inf]", "decode_per_kv_ktoken_ms: must be a finite number from 0, not inf"),
        ("0.5]", "nan]", "prefill_per_ktoken2_ms: must be a finite number, not nan"),
        ("tp = 2,", "tp = 2, request_ms = inf,", "request_ms: must be a finite number from 0, not inf"),
        ("[5.0, 0.1", "[-1.0, 0.0", "a decode step must take time"),
        ("[10.0, 0.5]", "[0.0, -0.5]", "prefill must take time"),
        ("[models.mine]", "[[models]]", "is not a profile file"),
    ],
)
def test_a_profile_that_no_engine_can_have_is_refused(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    """In one line with the file and the number. A simulation with it would not end, or end in a traceback."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace(right, wrong))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_profile(f"{path}:mine-l4-tp2")
    assert str(path) in str(raised.value)
