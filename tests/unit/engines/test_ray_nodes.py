import pytest

from fedmerge.engines import Homes, Node, Share


def node(name: str, *clients: str, cpus: float = 1, gpus: float = 0) -> Node:
    labels = {f"client:{client}": 1.0 for client in clients}
    return Node(name, "127.0.0.1", {"CPU": cpus, "GPU": gpus, **labels})


@pytest.mark.parametrize(
    ("share", "cpus", "gpus", "expected"),
    [
        (Share(1), 4, 0, 4),
        (Share(3), 8, 0, 2),
        (Share(0.1), 1, 0, 10),
        (Share(2), 1, 0, 0),
        (Share(1, 1), 8, 2, 2),
        (Share(4, 1), 6, 2, 1),  # too few processors for the second GPU
        (Share(1, 2), 8, 5, 2),
        (Share(0.1, 0.4), 8, 2, 4),  # nobody gets two fifths of one GPU's rest and of another's
        (Share(0.1, 0.1), 8, 1, 10),
        (Share(1, 1), 8, 0, 0),
    ],
)
def test_slots_are_what_a_node_has_by_what_a_client_gets(
    share: Share, cpus: float, gpus: float, expected: int
) -> None:
    assert share.slots(node("n", cpus=cpus, gpus=gpus)) == expected


def test_a_node_without_processors_has_no_slots() -> None:
    assert Share().slots(Node("n", "127.0.0.1", {})) == 0


def homes(clients: str, *nodes: Node, share: Share | None = None) -> dict[str, list[str]]:
    found = Homes(share or Share()).find(list(clients), nodes)
    return {client: [node.id for node in at] for client, at in found.items()}


def test_labelled_clients_run_at_their_labels_and_others_anywhere() -> None:
    found = homes("abc", node("one", "a"), node("two", "b", "a"))
    assert found == {"a": ["one", "two"], "b": ["two"], "c": ["one", "two"]}


def test_a_label_on_a_node_that_is_too_small_is_no_place() -> None:
    small, large = node("small", "a"), node("large", cpus=2)
    assert homes("ab", small, large, share=Share(2)) == {"a": [], "b": ["large"]}


def test_a_client_whose_label_is_gone_runs_nowhere_until_it_is_back() -> None:
    known, one, two = Homes(Share()), node("one", "a"), node("two")
    assert known.find(["a"], [one, two]) == {"a": (one,)}
    assert known.find(["a"], [two]) == {"a": ()}
    assert known.find(["a"], [one, two]) == {"a": (one,)}
    assert Homes(Share()).find(["a"], [two]) == {"a": (two,)}  # had there never been one


def test_clients_of_one_node_do_not_keep_the_others_waiting() -> None:
    found = homes("abcdef", node("one", "a", "b", "c", cpus=1), node("two", "d", "e", "f", cpus=1))
    assert "".join(found) == "adbecf"
    wide = homes("abcdef", node("one", "a", "b", cpus=1), node("two", "c", "d", "e", "f", cpus=2))
    assert "".join(wide) == "acdbef"  # two at a time where there are two slots


def test_clients_without_labels_keep_their_order() -> None:
    assert "".join(homes("badc", node("one"), node("two", cpus=4))) == "badc"
