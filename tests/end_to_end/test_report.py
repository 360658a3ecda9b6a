"""`report`, `--report` and `plan --graph`, as a user runs them."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedmerge.cli import demo
from tests.digits import MODEL, images, save_clients, save_test
from tests.end_to_end.helpers import Cli, record_of, save, save_all
from tests.end_to_end.retraining import make_scene

NET = """
from torch import nn


def build(channels=4):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 5, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(180, 10),
    )
"""


@pytest.fixture
def merged(cli: Cli, tmp_path: Path) -> Path:
    """Three digit clients, merged from their files beside them."""
    clients = save_clients(tmp_path)
    cli.done("match", *clients, "-o", tmp_path / "global.pt")
    return tmp_path / "global.pt"


@pytest.fixture
def conv(cli: Cli, tmp_path: Path) -> Path:
    """Two convolutional clients of equal widths, merged, and their code beside them."""
    code = tmp_path / "net.py"
    code.write_text(NET, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(NET, space)
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append(dict(space["build"]().state_dict()))
    clients = save_all(states, tmp_path)
    cli.done("match", *clients, "-o", tmp_path / "global.pt", "--set", "flatten=36")
    return tmp_path / "global.pt"


def text_of(page: Path) -> str:
    """Return what a page says."""
    body = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", page.read_text("utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_a_record_alone_gives_a_page_with_hashes_widths_and_match_rates(
    cli: Cli, merged: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    said = cli.done("report", merged, "-o", page).out
    assert f"wrote {page}" in said
    record, shown = record_of(merged), text_of(page)
    for source in record["sources"]:
        assert source["sha256"] in shown
    (group,) = record["groups"]
    assert f"16 {group['width']} {100 * group['match_rate']:.1f} %" in shown
    assert f"{record['parameters']:,} parameters, {record['growth']:.2f} ×" in shown
    assert "How good this model is, is not known" in shown


def test_the_record_holds_the_match_costs_of_every_unit(merged: Path) -> None:
    record = record_of(merged)
    (group,) = record["groups"]
    assert group["threshold"] == 0.5
    assert [len(own) for own in group["similarities"]] == group["client_widths"]
    homes = [record["assignments"][s["name"]][group["name"]] for s in record["sources"]]
    owners = np.bincount(np.concatenate(homes), minlength=group["width"])
    for own, units in zip(group["similarities"], homes, strict=True):
        assert [cosine is None for cosine in own] == (owners[units] < 2).tolist()


def test_data_measure_the_merge_next_to_its_clients(cli: Cli, merged: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", save_test(tmp_path)
    asked = ("--model", MODEL, "--data", data)
    found = cli.done("report", merged, *asked, "-o", page, "--json").json
    scores = cli.done("eval", merged, *asked, "--json").json["models"]
    measured = scores[0]["metrics"]["accuracy"]
    assert f"reaches an accuracy of {100 * measured:.1f} %, against" in found["verdict"]
    assert "of the ensemble" in found["verdict"]
    assert "of the element-wise average" in found["verdict"]
    assert found["sections"][:2] == ["scores", "groups"]
    assert found["bytes"] == page.stat().st_size
    assert found["verdict"] in text_of(page)


def test_what_was_measured_replaces_predicted_doubts(cli: Cli, tmp_path: Path) -> None:
    clients, output, page = save_clients(tmp_path), tmp_path / "g.pt", tmp_path / "page.html"
    code = ("--model", MODEL)
    cli.done("match", *clients, *code, "--set", "probe_count=60", "-o", output, "--report", page)
    (doubt,) = record_of(output)["warnings"]
    assert doubt.startswith("the merge may be worse than")
    assert doubt in text_of(page)
    measured = ("--data", save_test(tmp_path), "-o", page, "--force")
    cli.done("report", output, *code, *measured)
    assert "may be worse" not in text_of(page)
    untrained = save(
        {k: torch.zeros_like(v) for k, v in torch.load(clients[0]).items()}, clients[0]
    )
    cli.done(
        "match", untrained, *clients[1:], *code, "--set", "probe_count=60", "-o", output, "--force"
    )
    cli.done("report", output, *code, *measured)
    assert "client c1 answers unlike the others" in text_of(page)  # data don't tell that


def test_a_merge_that_was_trained_on_probes_is_measured_like_others(
    cli: Cli, tmp_path: Path
) -> None:
    clients, output = save_clients(tmp_path), tmp_path / "g.pt"
    trained = ("--set", "probe_count=60", "--effort", "normal")
    cli.done("match", *clients, "--model", MODEL, *trained, "-o", output)
    asked = ("--model", MODEL, "--data", save_test(tmp_path), "-o", tmp_path / "page.html")
    assert (
        "of the element-wise average"
        in cli.done("report", output, *asked, "--json").json["verdict"]
    )


def test_a_merge_writes_its_page_with_predicted_quality_and_frontier(
    cli: Cli, tmp_path: Path
) -> None:
    clients, page = save_clients(tmp_path), tmp_path / "page.html"
    asked = ("--model", MODEL, "--set", "probe_count=60", "--frontier", "--report", page)
    found = cli.done("match", *clients, *asked, "-o", tmp_path / "g.pt", "--json").json
    assert found["report"] == str(page)
    shown = text_of(page)
    decided = found["quality"]["agreement"]["decisions"]
    assert f"decides as the clients' ensemble does in {100 * decided:.1f} %" in shown
    assert "What other sizes would give" in shown
    assert f"{found['frontier']['points'][-1]['parameters']:,}" in shown


def test_an_image_shows_what_matched_units_see(cli: Cli, conv: Path, tmp_path: Path) -> None:
    shard = tmp_path / "shard.npz"
    x, y = images()
    np.savez(shard, x=x[:4], y=y[:4])
    asked = ("--model", f"{tmp_path / 'net.py'}:build", "--image", shard, "--image-index", 2)
    cli.done("report", conv, *asked, "-o", tmp_path / "r.html")
    shown = text_of(tmp_path / "r.html")
    assert "shard.npz, sample 2" in shown
    assert "merged a b average" in shown
    pictures = re.findall(r'<img class="([^"]*)"', (tmp_path / "r.html").read_text("utf-8"))
    assert pictures.count("image") == 2  # the input of both groups
    assert pictures.count("filter") > 4


def test_pictures_and_arrays_are_images_too(cli: Cli, conv: Path, tmp_path: Path) -> None:
    pixels = np.round(255 * images()[0][0, 0]).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    np.save(tmp_path / "digit.npy", pixels.astype(np.float32) / 255)
    pages = []
    for name in ("digit.png", "digit.npy"):
        page = tmp_path / f"{name}.html"
        asked = ("--model", f"{tmp_path / 'net.py'}:build", "--image", tmp_path / name)
        cli.done("report", conv, *asked, "--image-group", "0", "-o", page)
        pages.append(re.findall(r'<img class="" src="([^"]+)"', page.read_text("utf-8")))
    assert pages[0] == pages[1]
    assert pages[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--image", "{d}/x.png"], "--image: models have to be run for it"),
        (["--data", "{d}/x.npz"], "--data: models have to be run for it"),
        (["--image-index", "1"], "--image-index is for --image"),
        (["--baseline", "{d}/a.pt"], "has no merge record"),
        (["--model", "{d}/net.py:build", "--image", "{d}/none.png"], "no such file"),
        (["--model", "{d}/net.py:build", "--image", "{d}/net.py"], "--image "),
    ],
)
def test_what_a_report_cannot_show_is_refused(
    cli: Cli, conv: Path, tmp_path: Path, more: list[str], says: str
) -> None:
    given = [word.format(d=tmp_path) for word in more]
    code = 1 if "--baseline" in more else 2
    cli.refused("report", conv, *given, "-o", tmp_path / "r.html", code=code, says=[says])
    assert not (tmp_path / "r.html").exists()


def test_groups_that_no_convolution_makes_are_refused_by_name(
    cli: Cli, conv: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", images()[0][0])
    asked = ("--model", f"{tmp_path / 'net.py'}:build", "--image", tmp_path / "x.npy")
    says = ["--image-group is 'fc9', which no convolution makes", "there are 0, 2"]
    cli.refused("report", conv, *asked, "--image-group", "fc9", code=2, says=says)


def test_an_existing_page_is_kept_without_force(cli: Cli, merged: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine", encoding="utf-8")
    cli.refused("report", merged, "-o", page, code=2, says=["exists already"])
    assert page.read_text("utf-8") == "mine"
    cli.done("report", merged, "-o", page, "--force")
    assert "SHA-256" in text_of(page)


def test_a_page_that_cannot_be_written_is_refused_before_the_merge(
    cli: Cli, tmp_path: Path
) -> None:
    clients = save_clients(tmp_path)
    asked = ("--report", tmp_path / "page.pdf", "-o", tmp_path / "g.pt")
    cli.refused("match", *clients, *asked, code=2, says=["let its name end in .html"])
    assert not (tmp_path / "g.pt").exists()


def test_clients_that_are_gone_or_changed_are_named(cli: Cli, merged: Path, tmp_path: Path) -> None:
    asked = ("--model", MODEL, "--data", save_test(tmp_path), "-o", tmp_path / "r.html")
    client = tmp_path / "c2.pt"
    state = torch.load(client, weights_only=True)
    client.unlink()
    cli.refused("report", merged, *asked, code=2, says=["client c2 (c2.pt) is not beside"])
    save({name: 2 * tensor for name, tensor in state.items()}, client)
    cli.refused("report", merged, *asked, code=1, says=["c2.pt", "was changed since the merge"])


def test_a_damaged_record_is_refused(cli: Cli, merged: Path, tmp_path: Path) -> None:
    place = Path(f"{merged}.json")
    record = json.loads(place.read_text("utf-8"))
    record["quality"] = {"clients": 3}
    place.write_text(json.dumps(record), encoding="utf-8")
    says = ["its merge record is damaged"]
    cli.refused("report", merged, "-o", tmp_path / "r.html", code=1, says=says)


def test_a_clients_hostile_name_stays_text(cli: Cli, tmp_path: Path) -> None:
    first, second = save_clients(tmp_path, 2)
    hostile = tmp_path / "<script>alert(1)<&script>.pt"
    first.rename(hostile)
    page = tmp_path / "page.html"
    cli.done("match", hostile, second, "-o", tmp_path / "g.pt", "--report", page)
    assert page.read_text("utf-8").count("<script") == 1
    assert "<script>alert(1)<&script>" in text_of(page)


def test_rounds_are_shown_next_to_baselines(cli: Cli, tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    own, other, page = tmp_path / "own.pt", tmp_path / "other.pt", tmp_path / "page.html"
    measured = ("--data", scene.data)
    cli.done(*scene.command("own.pt", *measured, "--report", page))
    assert "After 3 rounds of fedma, the global model reaches an accuracy of" in text_of(page)
    cli.done(*scene.command("other.pt", *measured, "--method", "fedavg", "--rounds", 2))
    cli.done("report", own, "--baseline", other, "-o", page, "--force")
    accuracy = record_of(other)["retrain"]["rounds"][-1]["metrics"]["accuracy"]
    shown = text_of(page)
    assert f"against {100 * accuracy:.1f} % of other" in shown
    assert "Accuracy by MB exchanged" in shown
    assert "Every one of the 3 clients took part in every round." in shown


def test_runs_without_client_files_are_measured_next_to_each_other(
    cli: Cli, tmp_path: Path
) -> None:
    scene = make_scene(tmp_path)
    cli.done(*scene.command("fedma.pt", clients=[]))
    (tmp_path / "other").mkdir()
    averaged = ("--method", "fedavg", "--rounds", 2)
    cli.done(*scene.command("other/fedma.pt", *averaged, clients=[]))
    own, other, page = tmp_path / "fedma.pt", tmp_path / "other" / "fedma.pt", tmp_path / "p.html"
    asked = ("--model", scene.model, "--data", scene.data)
    found = cli.done("report", own, "--baseline", other, *asked, "-o", page, "--json").json
    scores = cli.done("eval", own, other, *asked, "--json").json["models"]
    first, second = (f"{100 * score['metrics']['accuracy']:.1f} %" for score in scores)
    assert f"reaches an accuracy of {first}, against {second} of fedma;" in found["verdict"]
    assert "fedma (2)" in page.read_text("utf-8")  # in the curves, where the method names its own


def test_a_run_without_client_files_is_measured_alone(cli: Cli, tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    cli.done(*scene.command("own.pt", clients=[]))
    asked = ("--model", scene.model, "--data", scene.data, "-o", tmp_path / "page.html")
    found = cli.done("report", tmp_path / "own.pt", *asked, "--json").json
    assert found["verdict"].startswith("Measured on 30 samples of test.npz, the merge reaches")
    assert "against" not in found["verdict"]
    says = ["--image: the net has no convolution whose units are matched"]
    more = ("--image", scene.data, "--force")
    cli.refused("report", tmp_path / "own.pt", *asked, *more, code=2, says=says)


@pytest.fixture
def seen(cli: Cli, tmp_path: Path) -> list[object]:
    """A short run in rounds of convolutional clients on digits, without its output."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "shards").mkdir()
    x, y = images()
    for number, name in enumerate(("a", "b", "test")):
        part = slice(40 * number, 40 * number + 40)
        place = tmp_path if name == "test" else tmp_path / "shards"
        np.savez(place / f"{name}.npz", x=x[part], y=y[part])
    given = ("--shards", tmp_path / "shards", "--model", f"{tmp_path / 'net.py'}:build")
    return ["retrain", *given, "--epochs", 1, "--passes", 2, "--device", "cpu"]


def pictures_of(page: Path) -> list[str]:
    """Return the feature maps of a page, in their order."""
    return re.findall(r'<img class="" src="([^"]+)"', page.read_text("utf-8"))


def test_rounds_show_what_matched_units_see(cli: Cli, seen: list[object], tmp_path: Path) -> None:
    page, output = tmp_path / "page.html", tmp_path / "g.pt"
    shard = tmp_path / "shards" / "a.npz"
    image = ("--set", f"image={shard}", "--set", "image_index=3")
    cli.done(*seen, "-o", output, "--report", page, *image)
    shown = text_of(page)
    assert "a.npz, sample 3" in shown
    assert "merged a b average" in shown
    assert "The clients' layers are those that the last pass matched" in shown
    model = ("--model", f"{tmp_path / 'net.py'}:build")
    asked = (*model, "--image", shard, "--image-index", 3)
    cli.done("report", output, *asked, "-o", tmp_path / "later.html")
    assert pictures_of(page) == pictures_of(tmp_path / "later.html")
    assert len(set(pictures_of(page))) > 8
    other = ("--image", shard, "--image-index", 4)
    cli.done("report", output, *model, *other, "-o", tmp_path / "other.html")
    assert pictures_of(page) != pictures_of(tmp_path / "other.html")


def test_rounds_that_are_measured_show_the_first_sample_and_no_clients_own(
    cli: Cli, seen: list[object], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    cli.done(*seen, "-o", tmp_path / "g.pt", "--report", page, "--data", tmp_path / "test.npz")
    assert "test.npz, sample 0" in text_of(page)


def test_layers_of_another_run_are_refused(cli: Cli, seen: list[object], tmp_path: Path) -> None:
    cli.done(*seen, "-o", tmp_path / "g.pt")
    cli.done(*seen, "-o", tmp_path / "h.pt", "--seed", 1)
    asked = ("--model", f"{tmp_path / 'net.py'}:build", "--image", tmp_path / "test.npz")
    more = (*asked, "-o", tmp_path / "r.html", "--work-dir")
    says = ["are those of another run", "the run that wrote the merged file"]
    cli.refused("report", tmp_path / "g.pt", *more, tmp_path / "h.pt.work", code=2, says=says)
    says = ["of this run no client's layers were kept in", "--work-dir"]
    cli.refused("report", tmp_path / "g.pt", *more, tmp_path / "none", code=2, says=says)
    cli.done("report", tmp_path / "g.pt", *more, tmp_path / "g.pt.work")


def test_a_merge_shows_an_image_on_its_page(cli: Cli, conv: Path, tmp_path: Path) -> None:
    page, x = tmp_path / "page.html", tmp_path / "x.npy"
    np.save(x, images()[0][0])
    given = ("match", tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "g.pt")
    image = ("--set", f"image={x}")
    asked = (*image, "--model", f"{tmp_path / 'net.py'}:build", "--set", "probe=none")
    cli.refused(*given, *asked, code=2, says=["--set image is for a page", "--report"])
    cli.refused(*given, *image, "--report", page, code=2, says=["--set image", "--model"])
    shape = ("--input-shape", "1,1,8,8")
    cli.done(*given, *asked, *shape, "--report", page)
    assert "merged a b average" in text_of(page)


def test_an_image_that_is_not_there_is_refused_before_the_rounds(
    cli: Cli, seen: list[object], tmp_path: Path
) -> None:
    asked = ("--report", tmp_path / "page.html", "--set", f"image={tmp_path / 'none.png'}")
    cli.refused(*seen, "-o", tmp_path / "g.pt", *asked, code=2, says=["none.png: no such file"])
    assert not (tmp_path / "g.pt.work").exists()


@pytest.mark.slow
def test_the_demo_ends_with_a_page(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 1)
    said = cli.done("demo", tmp_path / "demo").out
    page = tmp_path / "demo" / "report.html"
    assert said.splitlines()[-1] == f"a page about the merge, for a browser: {page}"
    shown = text_of(page)
    assert "reaches an accuracy of" in shown  # measured
    assert "agreement with the ensemble" in shown  # and predicted, since the code was given
    average = next(line for line in said.splitlines() if "average, counts" in line).split()
    assert f"{average[2]} % of the element-wise average" in shown  # with the same counts
    assert [line.split("  ")[1] for line in said.splitlines() if line.startswith("  matched")] == [
        *("matched, files alone", "matched, code and counts"),
    ]


def test_a_one_shot_merge_has_no_rounds_to_compare(cli: Cli, merged: Path, tmp_path: Path) -> None:
    says = ["was merged in one shot"]
    cli.refused("report", merged, "--baseline", merged, code=2, says=says)


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_a_plan_is_drawn(cli: Cli, nets: list[Path], tmp_path: Path, name: str) -> None:
    graph = tmp_path / name
    assert f"drew {graph}" in cli.done("plan", nets[0], "--graph", graph).out
    start = graph.read_bytes()[:100]
    assert (b"<svg" in graph.read_bytes()) if name.endswith("svg") else start[1:4] == b"PNG"
    cli.refused("plan", nets[0], "--graph", graph, code=2, says=["exists already"])


def test_other_kinds_of_pictures_are_refused(cli: Cli, nets: list[Path], tmp_path: Path) -> None:
    says = ["expected a name that ends in .svg or .png"]
    cli.refused("plan", nets[0], "--graph", tmp_path / "plan.gif", code=2, says=says)
