"""Label trees: what unifying, cutting, splitting and writing leave free."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerge.architecture.from_code import Fixed, Label, Labels, Same, concat, labels_of, product
from fedmerge.architecture.from_code.rules import regroup


def test_equal_parts_are_a_product() -> None:
    labels = Labels()
    one = labels.fresh(5)
    assert concat((one, one, one)) == product((Fixed(3), one))


def test_fixed_neighbours_merge_and_keep_the_first_reason() -> None:
    assert product((Fixed(2, "pixels"), Fixed(1), Fixed(3))) == Fixed(6, "pixels")
    assert concat((Fixed(2), Fixed(3, "input"))) == Fixed(5, "input")


def test_two_labels_become_one() -> None:
    labels = Labels()
    one, other = labels.fresh(4), labels.fresh(4)
    labels.unify(one, other)
    assert labels.resolve(one) == labels.resolve(other)
    assert isinstance(labels.resolve(one), Label)


def test_products_meet_at_their_prefix_products() -> None:
    labels = Labels()
    four, six, two = labels.fresh(4), labels.fresh(6), labels.fresh(2)
    twelve = labels.fresh(12)
    labels.unify(product((four, six)), product((two, twelve)))
    inner = labels_of(labels.resolve(four))
    assert [label.size for label in inner] == [2, 2]
    assert labels.resolve(two) == inner[0]
    assert labels.resolve(twelve) == product((inner[1], labels.resolve(six)))


def test_products_that_do_not_align_are_pinned() -> None:
    labels = Labels()
    trees = [labels.fresh(size) for size in (2, 9, 3, 6)]
    labels.cause = "view"
    labels.unify(product(trees[:2]), product(trees[2:]))
    assert all(isinstance(labels.resolve(tree), Fixed) for tree in trees)
    assert labels.resolve(trees[0]) == Fixed(2, "view")


def test_concatenations_are_cut_at_all_boundaries() -> None:
    labels = Labels()
    a, b, c, d = (labels.fresh(size) for size in (3, 5, 6, 2))
    labels.unify(concat((a, b)), concat((c, d)))
    assert [leaf.size for leaf in labels_of(labels.resolve(b))] == [3, 2]
    assert labels.resolve(c) == concat((labels.resolve(a), labels_of(labels.resolve(b))[0]))
    assert labels.resolve(d) == labels_of(labels.resolve(b))[1]


def test_a_product_against_a_concatenation_splits_its_left_factor() -> None:
    labels = Labels()
    gates, units = labels.fresh(4), labels.fresh(6)
    parts = [labels.fresh(6) for _ in range(4)]
    labels.unify(product((gates, units)), concat(parts))
    assert all(labels.resolve(part) == labels.resolve(units) for part in parts)


def test_a_cut_inside_a_product_pins_its_left_factor_only() -> None:
    labels = Labels()
    left, right = labels.fresh(3), labels.fresh(4)
    head, tail = labels.cut(product((left, right)), (6, 6))
    assert isinstance(labels.resolve(left), Fixed)
    assert [leaf.size for leaf in labels_of(labels.resolve(right))] == [2, 2]
    assert head.size == tail.size == 6


def test_constants_agree_with_everything_until_they_are_written() -> None:
    labels = Labels()
    constant, units = labels.same(4), labels.fresh(4)
    labels.unify(constant, Fixed(4, "input"))
    labels.unify(constant, units)
    assert isinstance(labels.resolve(constant), Same)
    assert isinstance(labels.resolve(units), Label)
    labels.write((constant,), (constant,))
    labels.unify(constant, units)
    assert labels.resolve(constant) == labels.resolve(units)


def test_a_write_that_does_not_show_an_axis_pins_it() -> None:
    labels = Labels()
    rows, columns = labels.same(3), labels.same(4)
    labels.write((rows, columns), (columns,))
    assert isinstance(labels.resolve(rows), Fixed)
    assert isinstance(labels.resolve(columns), Label)


def test_axes_of_size_one_are_never_groups() -> None:
    assert Labels().fresh(1) == Fixed(1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_views_keep_every_size(old: list[int], data: st.DataObject) -> None:
    total, new, labels = 1, [], Labels()
    for size in old:
        total *= size
    while total > 1:
        new.append(data.draw(st.sampled_from([k for k in range(2, total + 1) if total % k == 0])))
        total //= new[-1]
    axes = [labels.fresh(size) for size in old]
    made = regroup(labels, axes, new)
    assert [tree.size for tree in made] == new
    assert [labels.resolve(tree).size for tree in axes] == old
    back = regroup(labels, made, old)
    assert [labels.resolve(t) for t in back] == [labels.resolve(t) for t in axes]
