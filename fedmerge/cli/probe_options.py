"""The options of merges that look at what clients do on probe inputs, as typer types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from fedmerge.cli.options import flag, option

_PROBES = "Probes (with --model or a .pt2)"
Probe: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "Inputs on which units are compared: noise, or made from the clients (default: the latter, "
        "noise for costly models), or none, for weights alone.",
        metavar="noise|synthetic|none",
    ),
]
ProbeData: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "Real inputs instead, no labels: x in .npz, .pt or .safetensors.",
        metavar="FILE",
    ),
]
ProbeCount: TypeAlias = Annotated[
    int | None, option(_PROBES, "How many probes (default: up to 1000).", metavar="N")
]
ProbeMean: TypeAlias = Annotated[
    str | None,
    option(_PROBES, "Mean of noise, one or per channel (default: 0).", metavar="M[,M…]"),
]
ProbeStd: TypeAlias = Annotated[
    str | None,
    option(_PROBES, "Deviation of noise, one or per channel (default: 1).", metavar="S[,S…]"),
]
ProbeNormalize: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "Mean and deviation of x/255, where --probe-data holds bytes.",
        "--normalize",
        metavar="MEAN,STD",
    ),
]
ProbeChannelsLast: TypeAlias = Annotated[
    bool, flag(_PROBES, "Images in --probe-data have their channels last.", "--channels-last")
]
Signature: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "What units are compared by (default: both).",
        metavar="weights|activations|both",
    ),
]
MergeUnits: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "Average what matches, or fit every layer to it on the probes (default: the better).",
        metavar="mean|fit",
    ),
]
Correct: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "What averaged units get back: their owners' weight norms (of files alone, too), or means "
        "and variances on the probes (default: none).",
        metavar="none|norm|moments",
    ),
]
BatchNorm: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "Statistics of averaged batch norms: the owners' mean, or anew from the probes "
        "(default: mean).",
        metavar="mean|reestimate",
    ),
]
Lead: TypeAlias = Annotated[
    str | None,
    option(
        _PROBES,
        "The client that shared units are taken from (default: the better of nobody and the "
        "client most alike the ensemble).",
        metavar="NAME|none",
    ),
]
Distill: TypeAlias = Annotated[
    bool,
    flag(
        _PROBES,
        "Train the merge on the probes to answer as the clients' ensemble does, without labels.",
        "--distill",
    ),
]
DistillSteps: TypeAlias = Annotated[
    int | None, option(_PROBES, "Steps of that training (default: 500).", metavar="N")
]
Frontier: TypeAlias = Annotated[
    bool,
    flag(
        _PROBES,
        "Also show what merges of other sizes would give, up to the ensemble itself.",
        "--frontier",
    ),
]
FrontierPlot: TypeAlias = Annotated[
    Path | None, option(_PROBES, "Draw that, too.", metavar="FILE.svg|FILE.png")
]
Symmetries: TypeAlias = Annotated[
    bool,
    flag(
        _PROBES,
        "Before matching, give units the signs, and embeddings the bases, in which clients are "
        "most alike, where that changes nothing of what they compute.",
        "--symmetries/--no-symmetries",
    ),
]
DropOutliers: TypeAlias = Annotated[
    bool,
    flag(_PROBES, "Leave out clients that answer unlike the others.", "--drop-outliers"),
]
