"""`match --effort` and `match --frontier`, as a user runs them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.digits import MODEL, images, save_clients
from tests.end_to_end.helpers import Cli

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def asked(tmp_path: Path) -> list[object]:
    """A merge of three clients of digits on real images, without its output."""
    (tmp_path / "in").mkdir()
    clients = save_clients(tmp_path / "in")
    np.savez(tmp_path / "probes.npz", x=images()[0][:300])
    probes = ("--probe-data", tmp_path / "probes.npz")
    return ["match", *clients, "--model", MODEL, "--input-shape", "1,1,8,8", *probes]


@pytest.mark.slow
def test_a_refined_merge_says_which_start_won_and_is_made_again_from_its_record(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    said = cli.done(*asked, "--max-growth", 1, "-o", tmp_path / "a.pt").out
    assert ": refined " in said
    assert "quality, predicted: " in said
    record = tmp_path / "a.pt.json"
    again = (*asked[4:], "--config", record, "-o", tmp_path / "b.pt", "--json")
    quality = cli.done("match", *asked[1:4], *again).json["quality"]
    assert quality["chosen"].startswith("refined ")
    distances = [own["distance"] for own in quality["candidates"].values()]
    assert quality["agreement"]["distance"] == min(distances)
    first, second = (torch.load(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    cli.done("verify", tmp_path / "a.pt", *asked[1:4])


def test_more_effort_gives_another_model_and_a_nearer_one(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    distances, states = [], []
    for effort in ("fast", "normal"):
        output = tmp_path / f"{effort}.pt"
        more = ("--effort", effort, "--max-growth", 1, "-o", output, "--json")
        quality = cli.done(*asked, *more).json["quality"]
        distances.append(quality["agreement"]["distance"])
        states.append(torch.load(output))
    assert distances[1] < distances[0]
    fast, normal = states
    assert not any(torch.equal(fast[name], normal[name]) for name in fast)


def test_nothing_is_written_where_the_merge_is_not_better_as_required(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    alone, required = [*asked[:1], asked[1], asked[1]], ("--require", "better")
    says = ["the merge is not expected to be better than every client", "without --require"]
    cli.refused(*alone, *asked[4:], *required, "-o", tmp_path / "g.pt", code=1, says=says)
    cli.refused(*asked[:4], *required, "-o", tmp_path / "g.pt", code=1, says=["nothing tells"])
    assert not list(tmp_path.glob("g.pt*"))
    cli.done(*asked, *required, "-o", tmp_path / "g.pt")
    assert (tmp_path / "g.pt").exists()


def test_the_frontier_ends_with_the_ensemble_and_the_merge_is_written(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    said = cli.done(*asked, "--frontier", "-o", tmp_path / "g.pt").out
    table = said[: said.index("3 clients (")].splitlines()
    assert table[0] == "size against agreement with the ensemble on 240 held-out probes"
    assert [line.split()[0] for line in table[2:]] == [*["client"] * 3, *["merge"] * 5, "ensemble,"]
    assert table[-1].split()[-4:] == ["3.00", "3,630", "100.0", "%"]
    assert (tmp_path / "g.pt").exists()


def merges_drawn(picture: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the places of a frontier's merges: of all markers those in their colour."""
    return [
        (float(marker.attrib["x"]), float(marker.attrib["y"]))
        for marker in picture.iter(f"{SVG}use")
        if "fill: #0072b2" in marker.get("style", "")
    ]


def test_the_frontier_is_given_as_json_and_drawn(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    plot = tmp_path / "sizes.svg"
    more = ("--set", f"frontier_plot={plot}", "-o", tmp_path / "g.pt", "--json")
    value = cli.done(*asked, "--effort", "fast", *more).json
    points = value["frontier"]["points"]
    assert [point["budget"] for point in points] == [1.0, 1.25, 1.5, 2.0, 3.0, None]
    assert points[-1]["agreement"] == {"decisions": 1.0, "explained": 1.0, "distance": 0.0}
    [asked_for] = [point for point in points if point["budget"] == 1.5]
    assert asked_for["parameters"] == value["parameters"]
    assert asked_for["agreement"] == value["quality"]["agreement"]
    picture = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    *merges, _ = merges_drawn(picture)  # the last one stands beside the name
    assert len(merges) == len(points) - 1  # but for the ensemble
    assert sorted(merges) == merges  # from the left to the right
    assert merges[-1][1] < merges[0][1]  # and up


def test_without_the_option_no_frontier_is_given(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    assert "frontier" not in cli.done(*asked, "--json", "-o", tmp_path / "g.pt").json


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--effort", "huge"], "--effort is 'huge', expected fast, normal or thorough"),
        (["--require", "best"], "--require is 'best', expected better"),
        (["--set", "augment=blur"], "--set augment is ('blur',), expected some of none, views"),
        (["--set", "frontier_plot=sizes.pdf"], "expected a name that ends in .svg or .png"),
        (["--set", "frontier_plot=nowhere/sizes.svg"], "its folder does not exist"),
        (["--frontier", "--set", "preset=paper"], "--frontier: the clients are not run"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    cli: Cli, asked: list[object], tmp_path: Path, options: list[str], says: str
) -> None:
    cli.refused(*asked, *options, "-o", tmp_path / "g.pt", code=2, says=[says])
    assert not (tmp_path / "g.pt").exists()


@pytest.mark.parametrize("option", [["--effort", "thorough"], ["--frontier"]])
def test_files_alone_are_refused(
    cli: Cli, asked: list[object], tmp_path: Path, option: list[str]
) -> None:
    clients = asked[1:4]
    cli.refused("match", *clients, *option, "-o", tmp_path / "g.pt", code=2, says=["--model"])


def test_an_existing_picture_is_kept_unless_forced(
    cli: Cli, asked: list[object], tmp_path: Path
) -> None:
    plot = tmp_path / "sizes.svg"
    plot.write_text("mine")
    more = (*asked, "--set", f"frontier_plot={plot}", "-o", tmp_path / "g.pt")
    cli.refused(*more, code=2, says=["exists already", "--force"])
    assert plot.read_text() == "mine"
    cli.done(*more, "--force")
    assert "<svg " in plot.read_text(encoding="utf-8")
