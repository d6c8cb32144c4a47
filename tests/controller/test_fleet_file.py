"""What a fleet file may contain, and the engine commands made from it."""

import json
from pathlib import Path

import pytest

from controller.admin_key import ADMIN_KEY_VARIABLE
from controller.assembly import launcher_of
from controller.commands import server_spec
from controller.desired import DesiredFleet
from controller.fleet_file import FleetFile, FleetFileError, load_fleet_file
from controller.journal import State
from controller.steps import DesiredServer

WHOLE = """
fleet = "rollout"
model = "Qwen/Qwen3-14B"
served_name = "policy"
gpus = 8
tp_sizes = [1, 2, 4]
first = [4, 2, 2]
state_dir = "state"

[engine]
slots = 128
flags = ["--max-model-len", "40960"]
environment = { NCCL_DEBUG = "WARN" }
kv_bytes_by_tp = { 2 = 30000000000 }
flags_by_tp = { 4 = ["--enable-expert-parallel"] }
profiles = { 1 = "qwen3-14b-h100-tp1", 2 = "qwen3-14b-h100-tp2", 4 = "qwen3-14b-h100-tp4" }
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_a_fleet_file_is_read_with_the_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths start at the file's folder, and no dump shows the key."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "secret")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fleet = load_fleet_file(written(tmp_path, WHOLE))
    assert fleet.local_devices == tuple("01234567") and fleet.first == (4, 2, 2)
    assert fleet.state_dir == tmp_path / "state"
    assert fleet.admin_key is not None and fleet.admin_key.get_secret_value() == "secret"
    assert {tp: profile.tp for tp, profile in fleet.profiles().items()} == {1: 1, 2: 2, 4: 4}
    assert launcher_of(fleet).inventory() == fleet.local_devices
    assert "secret" not in fleet.model_dump_json()


def test_files_of_the_kubernetes_launcher_are_relative_to_the_fleet_file(tmp_path: Path) -> None:
    """As every path in it; an absolute one stays. A namespace is no path."""
    options = 'template = "pods/engine.yaml"\nkubeconfig = "/etc/config"\nnamespace = "heddle"'
    text = f'fleet = "a"\nmodel = "m"\nlauncher = "kubernetes"\n[launcher_options]\n{options}\n'
    assert load_fleet_file(written(tmp_path, text)).launcher_options == {
        "template": str(tmp_path / "pods/engine.yaml"),
        "kubeconfig": "/etc/config",
        "namespace": "heddle",
    }


def test_a_path_may_begin_with_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everybody writes ~/.kube/config. As in the variable KUBECONFIG, there may be several."""
    monkeypatch.setenv("HOME", "/home/me")
    options = 'template = "~/engine.yaml"\nkubeconfig = "~/.kube/config:more/config:/etc/config"'
    text = f'fleet = "a"\nmodel = "m"\nlauncher = "kubernetes"\nstate_dir = "~/fleet"\n[launcher_options]\n{options}\n'
    fleet = load_fleet_file(written(tmp_path, text))
    assert fleet.state_dir == Path("/home/me/fleet")
    assert fleet.launcher_options == {
        "template": "/home/me/engine.yaml",
        "kubeconfig": f"/home/me/.kube/config:{tmp_path}/more/config:/etc/config",
    }


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    text = 'fleet = "a"\nmodel = "m"\ngpus = 1\n'
    assert load_fleet_file(written(tmp_path, f"\ufeff{text}")) == load_fleet_file(written(tmp_path, text))


def test_demand_may_be_read_over_tls(tmp_path: Path) -> None:
    """The URL has the same form as that of the gateway's store."""
    url = "rediss://:secret@redis.example:6380/1?ssl_cert_reqs=none"
    fleet = load_fleet_file(written(tmp_path, WHOLE + f'\n[demand]\nredis = "{url}"\n'))
    assert fleet.demand.redis is not None and fleet.demand.redis.get_secret_value() == url


def test_an_empty_admin_key_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the gateway: a client that sends no key must not pass for one that has it."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "")
    assert load_fleet_file(written(tmp_path, WHOLE)).admin_key is None


@pytest.mark.parametrize("key", ["of a file\n", " secret", "€"])
def test_a_key_that_cannot_be_sent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """As at the gateway; the message does not show it."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, key)
    with pytest.raises(FleetFileError, match=r"admin_key: .* printable ASCII") as raised:
        load_fleet_file(written(tmp_path, WHOLE))
    assert key.strip() not in str(raised.value)


# Eight engines of TP 1 and four of TP 2.
SLEEP = "[sleep]\ntp_sizes = [1, 2]\nweight_bytes = 10\nhost_bytes = 120\n[engine]\n"


@pytest.mark.parametrize("name", ["stop_grace_s", "move_timeout_s"])
def test_a_step_may_take_a_day_at_most(tmp_path: Path, name: str) -> None:
    """The gateway refuses a longer evacuation, so the server would never leave; Ray refuses an endless grace."""
    changed = WHOLE.replace("[engine]", f"[limits]\n{name} = 86401\n[engine]")
    with pytest.raises(FleetFileError, match=f"limits.{name}: must be at most 86400, not 86401$"):
        load_fleet_file(written(tmp_path, changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("[engine]", '[demand]\nredis = "http://x"\n[engine]'), "demand.redis: .* such as redis://"),
        (("gpus = 8", "gpu = 8"), "gpu: unknown, did you mean gpus\\?$"),
        (("gpus = 8", ""), "needs one of gpus, devices and cpu_slots, not none"),
        (("gpus = 8", "gpus = 8\ncpu_slots = 2"), r"not \['gpus', 'cpu_slots'\]"),
        (("tp_sizes = [1, 2, 4]", "tp_sizes = [1, 2, 3]"), "TP 3 is not a power of two"),
        (("tp_sizes = [1, 2, 4]", "tp_sizes = [1, 2, 16]"), "TP 16 is more than the 8 GPUs of a node"),
        (("first = [4, 2, 2]", "first = [8]"), "first: TP 8 is not among tp_sizes"),
        (('fleet = "rollout"', 'fleet = "Roll out"'), "fleet: must be up to 40 lower.*, not 'Roll out'$"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "somewhere"'), "is not a URL such as"),
        (('fleet = "rollout"', 'fleet = "rollout"\nlisten = "8070"'), "is not HOST:PORT"),
        (('fleet = "rollout"', 'fleet = "rollout"\nadmin_key = "x"'), "set HEDDLE_ADMIN_KEY"),
        (("2 = \"qwen3-14b-h100-tp2\"", "2 = \"qwen3-14b-h100-tp4\""), "engine.profiles.2: .* of TP 4, not 2$"),
        (("2 = \"qwen3-14b-h100-tp2\"", "2 = \"qwen3-14b-tp2\""), "unknown engine profile"),
        (("2 = \"qwen3-14b-h100-tp2\", ", ""), "planning.is_automatic needs a profile of TP 2"),
        (("[engine]", "[engine"), "is not TOML"),
        (("[engine]", "[sleep]\ntp_sizes = [8]\n[engine]"), "sleep.tp_sizes: TP 8 is not among tp_sizes"),
        (("[engine]", "[sleep]\ntp_sizes = [1, 2]\n[engine]"), "weights in host memory: set sleep.weight_bytes and"),
        (("[engine]", SLEEP.replace("120", "119")), r"may keep 12 x 10 bytes, more than sleep.host_bytes \(119\)$"),
        (("[engine]", SLEEP.replace("[sleep]", "[sleep]\nlevel = 3")), "sleep.level: must be 1 or 2, not 3$"),
        (("[engine]", SLEEP.replace("[sleep]", "[sleep]\nlevel = 2") + 'kind = "sglang"'), "sglang has no level 2"),
        (("[engine]", SLEEP + "kv_transfer = \"nixl\""), "use sleep or engine.kv_transfer$"),
        (("[engine]", SLEEP + "kv_tier = \"/mnt/kv\""), "never tried together with engine.kv_tier; use one"),
        (("[engine]", "[engine]\nkv_tier = \"kv\""), "must be an absolute path, .*, not 'kv'$"),
        (("[engine]", "[limits]\nobserve_interval_s = inf\n[engine]"), "limits.observe_interval_s: .* finite"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "http://a:99999"'), "gateway: .* is not a URL such as"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "http://u:secret@a:1"'), "gateway: must be without us"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "http://日本:1"'), "gateway: .* is not a URL such as"),
        (('fleet = "rollout"', f'fleet = "rollout"\ngateway = "http://{"a" * 64}:1"'), "gateway: .* is not a URL"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "http://a/?b=1"'), "gateway: .* is not a URL such as"),
        (('fleet = "rollout"', 'fleet = "rollout"\ngateway = "http://a:1/v1/"'), "gateway: must be without /v1"),
        (("[engine]", '[demand]\nredis = "redis://a:99999"\n[engine]'), "demand.redis: .* such as redis://"),
        (("[engine]", '[demand]\nredis = "redis://a/0?b=1"\n[engine]'), "demand.redis: .* such as redis://"),
        (("[engine]", '[demand]\nredis = "redis://a/first"\n[engine]'), "demand.redis: .* such as redis://"),
        (("gpus = 8", 'devices = ["0", "1", "0"]'), "devices: one is listed twice"),
        (("gpus = 8", 'devices = ["0", " 0"]'), "devices: one is listed twice"),
        (("gpus = 8", 'devices = ["0,1"]'), "devices.0: '0,1' is not one device"),
        (("gpus = 8", 'devices = [""]'), "devices.0: '' is not one device"),
        (("NCCL_DEBUG = ", '"NCCL=DEBUG" = '), "engine.environment.* 'NCCL=DEBUG' is not the name of an environment v"),
        (("flags_by_tp = { 4", "flags_by_tp = { 8"), "engine.flags_by_tp: TP 8 is not among tp_sizes"),
        (("kv_bytes_by_tp = { 2", "kv_bytes_by_tp = { 8"), "engine.kv_bytes_by_tp: TP 8 is not among tp_sizes"),
        (("gpus = 8\ntp_sizes = [1, 2, 4]", "gpus = 1\ntp_sizes = [2, 4]"), "no engine fits: .* is 2, .* are 1$"),
        (("2 = 30000000000", "2 = 0"), "engine.kv_bytes_by_tp.2: must be above 0, not 0$"),
        (("[engine]", '[engine]\nkind = "sglang"\nkv_transfer = "nixl"'), "engine.kv_transfer: SGLang cannot "),
        (('served_name = "policy"', 'served_name = ["a"]'), r"served_name: must be a string, not \['a'\]$"),
        (("slots = 128", "slot = 128"), r"engine.slot: unknown, did you mean slots\?$"),
        (("[engine]", "[limits]\nstart_timeout = 5\n[engine]"), r"limits.start_timeout: unknown, did you mean start_t"),
        (("gpus = 8", "gpus = true"), "gpus: must be a number, not true$"),
        (("slots = 128", "slots = true"), "engine.slots: must be a number, not true$"),
        (("[engine]", "[limits]\nmax_tries = true\n[engine]"), "limits.max_tries: must be a number, not true$"),
        (('fleet = "rollout"\n', ""), "fleet.toml: fleet: missing$"),
        (("gpus = 8", "gpus = 8\nfirst_ = true"), r"first_: unknown, did you mean first\?$"),
        (("gpus = 8", "gpus = 8\nlimits = 5"), "limits: must be a table, not 5$"),
        (('served_name = "policy"', 'served_name = ""'), "served_name: must not be empty, not ''$"),
        (('state_dir = "', 'state_dir = "\\u0000'), r"state_dir: must not have a NUL byte$"),
        (('"40960"]', '"\\u0000"]'), r"engine.flags.1: must not have a NUL byte$"),
        (('"WARN"', '"\\u0000"'), r"engine.environment.NCCL_DEBUG: must not have a NUL byte$"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_clear_line(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    """The line names the file and the field."""
    assert changed[0] in WHOLE
    text = WHOLE.replace(*changed) + "\n[planning]\nis_automatic = true\n"
    with pytest.raises(FleetFileError, match=message) as raised:
        load_fleet_file(written(tmp_path, text))
    assert "\n" not in str(raised.value) and "fleet.toml" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("visible", "is_refused"), [("4,5", True), ("GPU-8932f937", True), ("1,0", False), ("", False)]
)
def test_gpus_that_are_not_visible_to_the_controller_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, is_refused: bool
) -> None:
    """As on a node shared by Slurm: GPUs 0 and 1 are another job's. Engines were started on them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = 'fleet = "a"\nmodel = "m"\n'
    fleet = load_fleet_file(written(tmp_path, text + "gpus = 2\n"))
    if is_refused:
        with pytest.raises(FleetFileError, match=f"gpus = 2 .* CUDA_VISIBLE_DEVICES is {visible}: .* `devices`"):
            launcher_of(fleet)
    else:
        assert launcher_of(fleet).inventory() == ("0", "1")
    named = load_fleet_file(written(tmp_path, text + 'devices = ["4", "5"]\n'))
    assert launcher_of(named).inventory() == ("4", "5")


@pytest.mark.parametrize(
    ("where", "is_refused"),
    [
        ("gpus = 2", True),
        ('devices = ["4", "5"]', True),
        ('launcher = "ray"', True),
        ("cpu_slots = 2", False),
        ('launcher = "kubernetes"', False),
    ],
)
def test_engines_are_not_told_all_the_same_gpus(tmp_path: Path, where: str, is_refused: bool) -> None:
    """The variable of the file went before the GPUs that the launcher gave each engine: all ran on the first of these.
    Without GPUs, and in a Pod, which sees its own only, it does no harm."""
    text = f'fleet = "a"\nmodel = "m"\n{where}\n[engine]\nenvironment = {{ CUDA_VISIBLE_DEVICES = "4,5" }}\n'
    if not is_refused:
        assert load_fleet_file(written(tmp_path, text)).engine.environment
        return
    with pytest.raises(FleetFileError, match=r"fleet\.toml: engine\.environment: CUDA_VISIBLE_DEVICES is set for each"):
        load_fleet_file(written(tmp_path, text))


def test_an_engine_may_be_larger_than_a_node_only_if_it_may_span_nodes(tmp_path: Path) -> None:
    """Ray can do that, if its option is on. A larger size was refused with the option, too."""
    text = 'fleet = "a"\nmodel = "m"\nlauncher = "ray"\ntp_sizes = [8, 16]\nfirst = [16]\n[launcher_options]\n'
    fleet = load_fleet_file(written(tmp_path, text + "across_nodes = true\n"))
    devices = tuple(f"10.0.0.{node}-5a1bd029/{number}" for node in (1, 2) for number in range(8))
    (record,) = DesiredFleet(fleet, lambda: devices, State).first()
    assert [tuple(one["devices"]) for one in record["wanted"]] == [devices]
    with pytest.raises(FleetFileError, match="TP 16 is more than the 8 GPUs of a node"):
        load_fleet_file(written(tmp_path, text + "across_nodes = false\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match=r"cannot read .*absent\.toml: No such file"):
        load_fleet_file(tmp_path / "absent.toml")


def test_vllm_is_launched_for_a_fast_start(tmp_path: Path) -> None:
    """If the file has a KV size, it is fixed; if not, the result of profiling is kept. Each TP size has a compile
    cache."""
    fleet = load_fleet_file(written(tmp_path, WHOLE))
    two = server_spec(fleet, DesiredServer("rollout-1", 2, ("0", "1")))
    assert two.command[:3] == ("vllm", "serve", "Qwen/Qwen3-14B") and two.devices == ("0", "1")
    assert value_of(two.command, "--tensor-parallel-size") == "2" and value_of(two.command, "--max-num-seqs") == "128"
    assert value_of(two.command, "--kv-cache-memory-bytes") == "30000000000"
    assert "VLLM_ENABLE_STARTUP_PLAN" not in two.environment
    four = server_spec(fleet, DesiredServer("rollout-2", 4, ("4", "5", "6", "7")))
    assert "--kv-cache-memory-bytes" not in four.command and four.command[-1] == "--enable-expert-parallel"
    assert four.environment["VLLM_ENABLE_STARTUP_PLAN"] == "1" and four.environment["NCCL_DEBUG"] == "WARN"
    assert four.environment["VLLM_CACHE_ROOT"] != two.environment["VLLM_CACHE_ROOT"]


def test_plans_count_the_slots_that_engines_are_launched_with(tmp_path: Path) -> None:
    """An engine of any TP size has as many. Plans counted the profile's, which grow with the TP size."""
    fleet = load_fleet_file(written(tmp_path, WHOLE))
    launched = {tp: server_spec(fleet, DesiredServer("a", tp, tuple("0123"[:tp]))) for tp in fleet.tp_sizes}
    assert {tp: value_of(spec.command, "--max-num-seqs") for tp, spec in launched.items()} == dict.fromkeys(
        fleet.tp_sizes, "128"
    )
    assert {tp: profile.slots for tp, profile in fleet.profiles().items()} == dict.fromkeys(fleet.tp_sizes, 128)
    unset = load_fleet_file(written(tmp_path, WHOLE.replace("slots = 128\n", "")))
    assert [profile.slots for profile in unset.profiles().values()] == [100, 200, 400]


def test_vllm_is_launched_with_kv_transfer_if_configured(tmp_path: Path) -> None:
    """KV that it cannot fetch is recomputed. Others reach it at an address and a port from its launcher."""
    fleet = load_fleet_file(written(tmp_path, WHOLE.replace("[engine]", '[engine]\nkv_transfer = "nixl"')))
    spec = server_spec(fleet, DesiredServer("a", 2, ("0", "1")))
    config = json.loads(value_of(spec.command, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_both")
    assert config["kv_load_failure_policy"] == "recompute" and "kv_buffer_device" not in config
    assert spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "{kv_port}"
    plain = server_spec(load_fleet_file(written(tmp_path, WHOLE)), DesiredServer("a", 2, ("0", "1")))
    assert "--kv-transfer-config" not in plain.command


@pytest.mark.parametrize("both", [False, True])
def test_vllm_is_launched_with_a_kv_tier_if_configured(tmp_path: Path, both: bool) -> None:
    """The tier also keeps generated tokens, in one layout for all TP sizes. With NIXL, live engines are asked first."""
    more = '\nkv_tier = "/mnt/kv"\nkv_tier_host_bytes = 1000' + both * '\nkv_transfer = "nixl"'
    fleet = load_fleet_file(written(tmp_path, WHOLE.replace("[engine]", "[engine]" + more)))
    spec = server_spec(fleet, DesiredServer("a", 2, ("0", "1")))
    config = json.loads(value_of(spec.command, "--kv-transfer-config"))
    assert config["engine_id"] == "a" and config["kv_load_failure_policy"] == "recompute"
    if both:
        first, config = config["kv_connector_extra_config"]["connectors"]
        assert first["kv_connector"] == "NixlConnector"
    extra = config["kv_connector_extra_config"]
    assert config["kv_connector"] == "OffloadingConnector" and extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 1000 and extra["canonical_layout"] and not extra["offload_prompt_only"]
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/mnt/kv"}]


def test_sglang_is_launched_with_a_kv_tier_if_configured(tmp_path: Path) -> None:
    """HiCache writes everything that is computed through to the tier, and a request waits for what it finds there."""
    text = WHOLE.replace("[engine]", '[engine]\nkind = "sglang"\nkv_tier = "/mnt/kv"')
    spec = server_spec(load_fleet_file(written(tmp_path, text)), DesiredServer("a", 2, ("0", "1")))
    assert (
        value_of(spec.command, "--hicache-storage-backend") == "file" and "--enable-hierarchical-cache" in spec.command
    )
    assert value_of(spec.command, "--hicache-write-policy") == "write_through"
    assert value_of(spec.command, "--hicache-storage-prefetch-policy") == "wait_complete"
    assert spec.environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/mnt/kv"


def test_fast_starts_can_be_turned_off(tmp_path: Path) -> None:
    """Then no environment is set but the file's own."""
    fleet = load_fleet_file(written(tmp_path, WHOLE + "is_fast_start = false\n"))
    assert server_spec(fleet, DesiredServer("a", 4, ("0", "1", "2", "3"))).environment == {"NCCL_DEBUG": "WARN"}


def test_sglang_is_launched_to_serve_low_priority_values_first(tmp_path: Path) -> None:
    """Without that flag it would serve the least urgent turn first."""
    fleet = load_fleet_file(written(tmp_path, WHOLE.replace("[engine]", '[engine]\nkind = "sglang"')))
    spec = server_spec(fleet, DesiredServer("a", 2, ("0", "1")))
    assert "--schedule-low-priority-values-first" in spec.command and value_of(spec.command, "--tp-size") == "2"
    assert "--skip-server-warmup" in spec.command


def test_engines_that_may_sleep_are_launched_with_sleep_mode(tmp_path: Path) -> None:
    """Other TP sizes are launched without it. The spec names the servers that an engine sleeps beside. Ray is
    refused."""
    fleet = load_fleet_file(written(tmp_path, WHOLE.replace("[engine]", SLEEP)))
    two = server_spec(fleet, DesiredServer("a", 2, ("0", "1")), ["c", "b"])
    assert "--enable-sleep-mode" in two.command and two.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert two.beside == ("b", "c")
    assert "--enable-sleep-mode" not in server_spec(fleet, DesiredServer("a", 4, ("0", "1", "2", "3"))).command
    sglang = load_fleet_file(written(tmp_path, WHOLE.replace("[engine]", SLEEP + 'kind = "sglang"')))
    command = server_spec(sglang, DesiredServer("a", 2, ("0", "1"))).command
    assert "--enable-memory-saver" in command and "--enable-weights-cpu-backup" in command
    with pytest.raises(ValueError, match="ray gives each GPU to one engine"):
        FleetFile(fleet="f", model="m", launcher="ray", sleep={"tp_sizes": (1,)})


def test_vllms_module_takes_the_model_as_a_flag() -> None:
    """Without a command `vllm`, the program is `python -m vllm.entrypoints.openai.api_server`."""
    program = ("python", "-m", "vllm.entrypoints.openai.api_server")
    fleet = FleetFile(fleet="f", model="m", cpu_slots=1, engine={"program": program})
    assert value_of(server_spec(fleet, DesiredServer("a", 1, ("cpu0",))).command, "--model") == "m"


def value_of(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]
