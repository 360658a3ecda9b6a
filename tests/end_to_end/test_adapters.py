"""LoRA adapters as files: merged, written as folders, checked."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedmerge
from fedmerge.checkpoint import read_record, values_digest
from tests.adapters import IN_MODEL, MODULES, adapter, config_of, update
from tests.end_to_end.helpers import Cli
from tests.schemas import check_json

TIGHT = 1e-12  # float64: a few products


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two adapters of different ranks and scalings."""
    return [
        adapter(tmp_path / "run-a", 1, rank=2),
        adapter(tmp_path / "run-b", 2, rank=3, use_rslora=True, ranks={"encoder.fc2": 1}),
    ]


def mean(folders: list[Path], module: str, weights: tuple[float, ...] = (1, 1)) -> torch.Tensor:
    shares = np.array(weights) / sum(weights)
    return sum(
        (s * update(f, module) for s, f in zip(shares, folders, strict=True)),
        start=torch.zeros(MODULES[module], dtype=torch.float64),
    )


def test_the_mean_of_updates_is_exact_at_the_sum_of_ranks(
    runs: list[Path], tmp_path: Path, cli: Cli
) -> None:
    found = cli.done("match", *runs, "-o", tmp_path / "merged", "--json").json
    assert found["clients"] == ["run-a", "run-b"]
    assert (found["rank"], found["client_ranks"]) == (5, {"run-a": 2, "run-b": 3})
    assert (found["kept"], found["modules"]) == (1.0, 2)
    names = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    config = config_of(tmp_path / "merged")
    assert {config["r"], *config["rank_pattern"].values()} == {5, 3}
    assert config["rank_pattern"] == config["alpha_pattern"]
    factors = load_file(tmp_path / "merged" / "adapter_model.safetensors")
    first, second = (load_file(run / "adapter_model.safetensors") for run in runs)
    for module in MODULES:
        found_update = update(tmp_path / "merged", module)
        assert torch.allclose(found_update, mean(runs, module), rtol=0, atol=TIGHT)
        a = f"{IN_MODEL}{module}.lora_A.weight"
        assert torch.equal(factors[a], torch.cat([first[a], second[a]]))
        # The mean of factors, which is what an average of the files would be, is another update.
        if first[a].shape == second[a].shape:
            b = a.replace("lora_A", "lora_B")
            naive = (first[b] + second[b]) / 2 @ (first[a] + second[a]) / 2
            assert not torch.allclose(naive, found_update, rtol=0, atol=1e-2)


@pytest.mark.parametrize("growth", [1, 1.34, 2])
def test_a_lower_rank_is_the_best_of_its_rank_and_says_what_is_kept(
    growth: float, runs: list[Path], tmp_path: Path, cli: Cli
) -> None:
    found = cli.done(
        *("match", *runs, "-o", tmp_path / "merged", "--max-growth", growth, "--json")
    ).json
    whole = kept = 0.0
    for module, largest in (("encoder.fc1", 3), ("encoder.fc2", 2)):
        exact = mean(runs, module)
        values = torch.linalg.svdvals(exact)
        rank = int(growth * largest)
        merged = update(tmp_path / "merged", module)
        assert torch.linalg.matrix_rank(merged) == min(rank, torch.linalg.matrix_rank(exact))
        lost = float((merged - exact).square().sum())
        assert lost == pytest.approx(float(values[rank:].square().sum()), abs=TIGHT)
        whole, kept = whole + float(exact.square().sum()), kept + float(exact.square().sum()) - lost
    assert found["kept"] == pytest.approx(kept / whole, abs=TIGHT)
    assert read_record(tmp_path / "merged")["kept"] == found["kept"]
    assert (found["kept"] == 1) == (growth == 2)
    assert found["rank"] == min(5, int(growth * 3))


def test_clients_count_as_they_are_told_to(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    weights = ("--set", "client_weight=run-a=3")
    cli.done("match", *runs, "-o", tmp_path / "merged", *weights)
    for module in MODULES:
        found = update(tmp_path / "merged", module)
        assert torch.allclose(found, mean(runs, module, (3, 1)), rtol=0, atol=TIGHT)
        assert not torch.allclose(found, mean(runs, module), rtol=0, atol=1e-3)
    assert "equal" in cli.done("verify", tmp_path / "merged", *runs).out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [(), ("--max-growth", "1")])
def test_verify_recomputes_updates_in_any_dtype(
    dtype: torch.dtype, options: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    runs = [adapter(tmp_path / f"run-{seed}", seed, dtype=dtype) for seed in (1, 2)]
    merged = tmp_path / "merged"
    said = cli.done("match", *runs, "-o", merged, *options).out.splitlines()
    assert load_file(merged / "adapter_model.safetensors").popitem()[1].dtype == dtype
    checked = shlex.split(said[-1])[1:]  # as it is printed
    out = cli.done(*checked).out
    assert "4 tensors agree with the record" in out
    assert "recomputed from its 2 clients: equal" in out
    assert "not recomputed" in cli.done("verify", merged).out
    check_json("adapter-record", read_record(merged))


def forged(merged: Path, change: dict[str, float], record: dict[str, Any] | None = None) -> None:
    """Write a merged adapter again with other numbers, and a record that agrees with them."""
    state = load_file(merged / "adapter_model.safetensors")
    for name, factor in change.items():
        state[name] = state[name] * factor
    told = read_record(merged) | (record or {})
    told["tensors"] = {name: values_digest([t.flatten()], "") for name, t in state.items()}
    metadata = {"format": "pt", "fedmerge": json.dumps(told)}
    save_file(state, merged / "adapter_model.safetensors", metadata=metadata)


@pytest.mark.parametrize("options", [(), ("--max-growth", "1")])
def test_verify_finds_updates_that_are_not_the_mean(
    options: tuple[str, ...], runs: list[Path], tmp_path: Path, cli: Cli
) -> None:
    merged = tmp_path / "merged"
    cli.done("match", *runs, "-o", merged, *options)
    forged(merged, {})
    assert "equal" in cli.done("verify", merged, *runs).out
    forged(merged, {f"{IN_MODEL}encoder.fc1.lora_B.weight": 1.01})
    assert "agree" in cli.done("verify", merged).out  # with its own record
    outcome = cli("verify", merged, *runs)
    assert outcome.code == 1
    assert "'encoder.fc1' is not the mean of its clients' updates" in outcome.err


def test_verify_finds_other_clients_and_other_bytes(
    runs: list[Path], tmp_path: Path, cli: Cli
) -> None:
    merged, other = tmp_path / "merged", adapter(tmp_path / "run-c", 3)
    cli.done("match", *runs, "-o", merged)
    for given, says in (
        ([runs[0]], "client run-b is not among"),
        ([*runs, other], "run-c is none of"),
    ):
        outcome = cli("verify", merged, *given)
        assert (outcome.code, says in outcome.err) == (1, True), outcome.err
    path = runs[0] / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    assert "client run-a is not among" in cli("verify", merged, *runs).err
    state = load_file(merged / "adapter_model.safetensors")
    record = {"format": "pt", "fedmerge": json.dumps(read_record(merged))}
    state[f"{IN_MODEL}encoder.fc1.lora_A.weight"][0, 0] += 1
    save_file(state, merged / "adapter_model.safetensors", metadata=record)
    assert "differs from its recorded SHA-256" in cli("verify", merged).err


def test_files_and_patterns_mean_their_folders(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    ways: list[list[object]] = [
        [run / "adapter_model.safetensors" for run in runs],
        [f"{tmp_path}/run-*"],
        [f"{tmp_path}/run-*/*.safe*"],
    ]
    for number, given in enumerate(ways):
        found = cli.done("match", *given, "-o", tmp_path / f"m{number}", "--json").json
        assert found["clients"] == ["run-a", "run-b"]
    contents = {
        (tmp_path / f"m{number}" / "adapter_model.safetensors").read_bytes() for number in range(3)
    }
    assert len(contents) == 1


def test_layers_that_were_trained_whole_and_biases_are_averaged(tmp_path: Path, cli: Cli) -> None:
    name = f"{IN_MODEL}head.weight"
    wholes = [torch.full((3, 6), value, dtype=torch.float64) for value in (1.0, 4.0)]
    bias = f"{IN_MODEL}encoder.fc1.lora_B.bias"
    biases = [torch.full((7,), value, dtype=torch.float64) for value in (1.0, 5.0)]
    runs = [
        adapter(
            tmp_path / f"run-{n}",
            n,
            more={name: wholes[n], bias: biases[n]},
            lora_bias=True,
            modules_to_save=["head"],
            lora_alpha=2 + 2 * n,  # scalings 1 and 2
        )
        for n in range(2)
    ]
    cli.done("match", *runs, "-o", tmp_path / "merged", "--set", "client_weight=run-1=2")
    state = load_file(tmp_path / "merged" / "adapter_model.safetensors")
    assert torch.equal(state[name], torch.full((3, 6), 3.0, dtype=torch.float64))
    expected = torch.full((7,), (1 * 1 + 2 * 2 * 5) / 3, dtype=torch.float64)
    assert torch.allclose(state[bias], expected, rtol=0, atol=TIGHT)
    assert "equal" in cli.done("verify", tmp_path / "merged", *runs).out
    forged(tmp_path / "merged", {name: 1.5})
    assert "not the mean of its clients'" in cli("verify", tmp_path / "merged", *runs).err


def test_a_module_that_one_client_lacks_counts_as_zero(tmp_path: Path, cli: Cli) -> None:
    first = {"encoder.fc1": MODULES["encoder.fc1"]}
    runs = [
        adapter(tmp_path / "run-a", 1, modules=first, target_modules=["fc1"]),
        adapter(tmp_path / "run-b", 2),
    ]
    outcome = cli.done("match", *runs, "-o", tmp_path / "merged")
    assert "update different modules" in outcome.err
    for module in MODULES:
        found = update(tmp_path / "merged", module)
        assert torch.allclose(found, mean(runs, module), rtol=0, atol=TIGHT)
    assert config_of(tmp_path / "merged")["target_modules"] == sorted(MODULES)


def test_a_merged_adapter_is_a_client_again(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    cli.done("match", *runs, "-o", tmp_path / "merged")
    again = [tmp_path / "merged", runs[0]]
    cli.done("match", *again, "-o", tmp_path / "again")
    for module in MODULES:
        expected = (mean(runs, module) + update(runs[0], module)) / 2
        assert torch.allclose(update(tmp_path / "again", module), expected, rtol=0, atol=TIGHT)


def test_what_is_known_of_base_and_code_is_not_copied(tmp_path: Path, cli: Cli) -> None:
    """Whoever loads the result imports what auto_mapping names."""
    mapping = {"base_model_class": "Net", "parent_library": "evil"}
    runs = [adapter(tmp_path / f"run-{n}", n, auto_mapping=mapping) for n in range(2)]
    cli.done("match", *runs, "-o", tmp_path / "merged")
    assert "evil" not in (tmp_path / "merged" / "adapter_config.json").read_text()


def test_different_base_models_are_warned_of(tmp_path: Path, cli: Cli) -> None:
    runs = [adapter(tmp_path / n, 1, base_model_name_or_path=n) for n in ("x", "y")]
    assert "different base models: x, y" in cli.done("match", *runs, "-o", tmp_path / "m").err


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"peft_type": "IA3"}, 3, "'IA3', expected LORA"),
        ({"use_dora": True}, 3, "`use_dora` is set (DoRA)"),
        ({"target_parameters": ["x"]}, 3, "`target_parameters` is set"),
        ({"init_lora_weights": "pissa_niter_4"}, 3, "began by changing its base model"),
        ({"rank_pattern": {"(.+)+x": 2}}, 3, "a regular expression"),
        ({"r": 4}, 3, "has rank 2, adapter_config.json says 4"),
        ({"r": 0}, 1, "a rank below 1"),
        ({"r": "x"}, 1, "no readable configuration"),
        ({"fan_in_fan_out": True}, 3, "`fan_in_fan_out` is True, expected False"),
    ],
)
def test_what_is_no_plain_product_is_refused(
    changes: dict[str, Any], code: int, says: str, tmp_path: Path, cli: Cli
) -> None:
    runs = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2, **{"rank": 2} | changes)]
    cli.refused("match", *runs, "-o", tmp_path / "m", code=code, says=[says])
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"peft_type": "LORA", "r": 1e400}'])
def test_a_damaged_configuration_is_refused(content: str, tmp_path: Path, cli: Cli) -> None:
    runs = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)]
    (runs[1] / "adapter_config.json").write_text(content)
    cli.refused(
        *("match", *runs, "-o", tmp_path / "m"),
        code=1,
        says=["adapter_config.json: truncated or damaged"],
    )


def test_factors_that_fit_no_other_are_refused(tmp_path: Path, cli: Cli) -> None:
    good = adapter(tmp_path / "good", 1)
    odd = {f"{IN_MODEL}encoder.fc3.lora_B.weight": torch.ones(3, 2, dtype=torch.float64)}
    wide = {"encoder.fc1": (7, 6), "encoder.fc2": (6, 7)}
    other = {f"{IN_MODEL}head.weight": torch.ones(3, 2, dtype=torch.float64)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"more": odd}, "belongs to no pair of factors"),
        ({"modules": {}, "more": other}, "no factors (lora_A, lora_B)"),
        ({"modules": wide}, "for a layer of another shape"),
        ({"more": other}, "'base_model.model.head.weight' is not in both"),
        ({"dtype": torch.float32}, "say which dtype"),
    ]
    for number, (options, says) in enumerate(cases):
        bad = adapter(tmp_path / f"bad-{number}", 2, **options)
        cli.refused("match", good, bad, "-o", tmp_path / "m", code=3, says=[says])


def test_adapters_are_compared_with_every_earlier_one(tmp_path: Path, cli: Cli) -> None:
    """Two clients may disagree on a module that the first one has no update of."""
    fc1, fc2 = MODULES.items()
    runs = [
        adapter(tmp_path / "a", 1, modules=dict([fc1])),
        adapter(tmp_path / "b", 2, modules=dict([fc1, fc2])),
        adapter(tmp_path / "c", 3, modules={fc1[0]: fc1[1], fc2[0]: (6, 8)}),
    ]
    says = ["c: the factors of 'encoder.fc2'", "than in b"]
    cli.refused("match", *runs, "-o", tmp_path / "m", code=3, says=says)
    bias = {f"{IN_MODEL}encoder.fc1.lora_B.bias": torch.ones(7, dtype=torch.float64)}
    odd = adapter(tmp_path / "d", 4, more=bias)
    cli.refused("match", runs[1], odd, "-o", tmp_path / "m", code=3, says=["have a bias alone"])


@pytest.mark.parametrize("alpha", [1e300, -1e120])
def test_updates_without_measure_are_refused(alpha: float, tmp_path: Path, cli: Cli) -> None:
    runs = [adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2, lora_alpha=alpha)]
    for options in ((), ("--max-growth", "1")):
        says = ["'encoder.fc1' are too large to be averaged"]
        cli.refused("match", *runs, "-o", tmp_path / "m", *options, code=3, says=says)


def test_truncated_factors_are_refused(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    path = runs[1] / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    cli.refused("match", *runs, "-o", tmp_path / "m", code=1, says=["truncated or damaged"])


def test_adapters_and_models_do_not_mix(
    runs: list[Path], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    cli.refused("match", runs[0], nets[0], "-o", tmp_path / "m", code=3, says=["no LoRA adapter"])
    cli.refused("plan", runs[0], code=3, says=["a LoRA adapter, not a model"])
    shown = cli.done("inspect", *runs).out
    assert "run-a: safetensors; 4 tensors" in shown
    assert "a LoRA adapter, not a model" in shown
    loose = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    for path, run in zip(loose, runs, strict=True):
        path.write_bytes((run / "adapter_model.safetensors").read_bytes())
    average = ("match", loose[0], loose[0], "-o", tmp_path / "m.pt", "--method", "average")
    cli.refused(*average, code=3, says=["has factors of a LoRA adapter", "adapter_config.json"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "m.pt"), "written as a folder"),
        (("-o", "m", "--model", "net.py:Net"), "--model means nothing for LoRA adapters"),
        (("-o", "m", "--keep", "x*"), "--keep means nothing for LoRA adapters"),
        (("-o", "m", "--method", "ensemble"), "cannot be set side by side"),
        (("-o", "run-a"), "also an input"),
    ],
)
def test_what_adapters_do_not_take_is_refused(
    arguments: tuple[str, ...],
    says: str,
    runs: list[Path],
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.refused("match", *runs, *arguments, code=2, says=[says])


def test_a_dry_run_writes_nothing(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    found = cli.done("match", *runs, "-o", tmp_path / "m", "--dry-run", "--json").json
    assert (found["rank"], found["output"], found["dry_run"]) == (5, None, True)
    assert not (tmp_path / "m").exists()


def test_an_output_is_replaced_with_force_alone(runs: list[Path], tmp_path: Path, cli: Cli) -> None:
    command = ("match", *runs, "-o", tmp_path / "m")
    cli.done(*command)
    cli.refused(*command, code=2, says=["exists already"])
    cli.done(*command, "--max-growth", "1", "--force")
    assert read_record(tmp_path / "m")["kept"] < 1


def test_python_merges_adapters_too(runs: list[Path]) -> None:
    merge = fedmerge.merge_adapters(runs, max_growth=1)
    assert merge.rank == 3
    state = merge.state_dict()
    assert state[f"{IN_MODEL}encoder.fc1.lora_A.weight"].shape == (3, 5)
    assert repr(merge).startswith("<AdapterMerge of 2 adapters (run-a, run-b): rank 3, ")


class Sentences(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(11, 4), nn.Conv1d(4, 6, 3)
        self.fc = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        channels = self.conv(self.embed(tokens).transpose(1, 2)).relu()
        logits: Tensor = self.fc(channels.mean(2))
        return logits


@pytest.mark.filterwarnings("ignore")  # of a library that warns of itself
@pytest.mark.parametrize("options", [(), ("--max-growth", "2")])
def test_merged_adapters_load_with_peft(options: tuple[str, ...], tmp_path: Path, cli: Cli) -> None:
    """peft's own updates, of an embedding and a convolution too, and their mean."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base, tokens = Sentences().double(), torch.arange(10).reshape(2, 5)
    folders, states = [], []
    for number, rank in enumerate((2, 3)):
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=5,
            use_rslora=number == 1,
            target_modules=["embed", "conv", "fc"],
            rank_pattern={"fc": 1 + number},
            alpha_pattern={"conv": 7},
        )
        model = peft.get_peft_model(copy.deepcopy(base), config).double()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        folders.append(tmp_path / f"run-{number}")
        model.save_pretrained(folders[-1])
        states.append(model.merge_and_unload().state_dict())
    cli.done("match", *folders, "-o", tmp_path / "merged", *options)
    assert "equal" in cli.done("verify", tmp_path / "merged", *folders).out
    mean = copy.deepcopy(base)
    mean.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "merged").double()
    assert torch.allclose(loaded(tokens), mean(tokens), rtol=0, atol=1e-9)
    assert not torch.allclose(base(tokens), mean(tokens), rtol=0, atol=1e-2)
