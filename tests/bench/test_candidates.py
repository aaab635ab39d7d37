"""Which sizes tune can choose from: specs that load takes, and shapes that are theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.bench.tune.candidates import Candidate, CandidateFamily, default_drafters, families
from foredraft.bench.tune.probe import DraftSize
from foredraft.compose.spec import Spec
from foredraft.core.errors import OptionError
from foredraft.drafters import BUNDLED_DRAFTS, METHODS

DRAFTING = sorted(name for name in METHODS if not (METHODS[name].untuned or METHODS[name].around))
ALONE = "another"
"""A model for which nothing ships."""


def each(found: list[CandidateFamily]) -> Iterator[tuple[CandidateFamily, Candidate]]:
    assert found
    for family in found:
        assert family.candidates
        for candidate in family.candidates:
            yield family, candidate


def constant(spec: str) -> bool:
    return Spec.parse(spec).options.num_assistant_tokens_schedule == "constant"


@pytest.mark.parametrize("model", ["sample", ALONE])
@pytest.mark.parametrize("method", DRAFTING)
def test_every_method_has_candidates_of_a_constant_size(method: str, model: str):
    found = families(method, model)
    for family, candidate in each(found):
        assert Spec.parse(family.name).name == Spec.parse(candidate.spec).name == method
        assert constant(family.probe) and constant(candidate.spec) and not constant(family.name)
    specs = [candidate.spec for _, candidate in each(found)]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("method", DRAFTING)
def test_every_shape_is_its_specs_own_and_fits_into_the_probe(method: str):
    """A candidate without limits is the probe itself."""
    for family, candidate in each(families(method, ALONE)):
        own, probe, shape = Spec.parse(candidate.spec).options, Spec.parse(family.probe).options, candidate.shape
        if shape == DraftSize():
            assert candidate.spec == family.probe
        elif method in ("eagle2", "eagle3", "glide", "opt_tree"):
            assert (own.depth, own.top_k) == (shape.depth, probe.top_k) and own.nodes == shape.nodes
            assert own.depth <= probe.depth and own.nodes <= probe.nodes
            assert probe.top_k > 1 or shape.nodes == shape.depth, "a chain may have siblings in sampled rows"
            most = own.top_k + (own.depth - 1) * own.top_k**2
            assert own.depth <= own.nodes <= most, "no tree asks for more nodes than can be scored"
        else:
            option = "prompt_lookup_num_tokens" if method == "prompt_lookup" else "num_assistant_tokens"
            length = getattr(own, option)
            assert shape == DraftSize(length, length) and length <= getattr(probe, option)


def test_trees_and_chains_of_a_head_have_probes_of_their_own():
    trees, chains = families("eagle3:H", ALONE)
    assert trees.name == chains.name == "eagle3:H" and trees.probe != chains.probe
    assert all("top_k=1" in candidate.spec.split(",") for candidate in chains.candidates)
    assert not any("top_k=1" in candidate.spec.split(",") for candidate in trees.candidates)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("draft_model:D,assistant_confidence_threshold=0.1", 8),
        ("draft_model:D,num_assistant_tokens=7", 1),
        ("draft_model:D,branching=3x2", 1),
        ("prompt_lookup,max_matching_ngram_size=5,min_matching_ngram_size=2", 8),
        ("prompt_lookup,prompt_lookup_num_tokens=7", 1),
        ("prompt_lookup,continuations=2", 8),
        ("eagle3:H,rope_theta=5000.0", 38),
        ("eagle3:H,nodes=9", 1),
        ("eagle2:H,depth=3,taps=1x2x3", 1),
        ("eagle1:H,tree=2x2", 1),
        ("eagle1:H,rope_theta=5000.0", 3),
        ("medusa:H,nodes=9", 1),
        ("medusa:H,tree=eagle", 1),
        ("hydra:H,tree=3x1", 1),
    ],
)
def test_options_that_are_given_stay(spec: str, count: int):
    """A shape that is given is the only one."""
    asked, given = Spec.parse(spec), [pair.partition("=")[0] for pair in spec.split(",")[1:]]
    made = list(each(families(spec, ALONE)))
    assert len(made) == count
    for family, candidate in made:
        assert family.name == spec
        for text in (family.probe, candidate.spec):
            options = Spec.parse(text).options
            assert all(getattr(options, name) == getattr(asked.options, name) for name in given)


def test_a_schedule_that_is_given_is_the_methods_own_and_candidates_are_constant_still():
    for family, candidate in each(families("eagle3:H,num_assistant_tokens_schedule=heuristic", ALONE)):
        assert Spec.parse(family.name).options.num_assistant_tokens_schedule == "heuristic"
        assert constant(family.probe) and constant(candidate.spec) and candidate.spec.count("_schedule=") == 1


@pytest.mark.parametrize("spec", ["eagle3:heads/mine,rope_theta=5000.0", "layer_skip:skips.json"])
def test_a_relative_path_becomes_absolute(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The choice is a file that may be read from elsewhere."""
    (tmp_path / "heads" / "mine").mkdir(parents=True)
    (tmp_path / "skips.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for family, candidate in each(families(spec, ALONE)):
        for text in (family.name, family.probe, candidate.spec):
            assert Spec.parse(text).path == str((tmp_path / (Spec.parse(spec).path or "")).resolve())


@pytest.mark.parametrize("spec", ["eagle3:org/head", "hydra", "prompt_lookup", "draft_model:nowhere"])
def test_what_is_no_folder_stays(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Least of all does a method without a path get the folder at hand."""
    monkeypatch.chdir(tmp_path)
    for family, candidate in each(families(spec, ALONE)):
        assert family.name == spec and Spec.parse(candidate.spec).path == Spec.parse(spec).path


@pytest.mark.parametrize("method", BUNDLED_DRAFTS["sample"])
def test_what_ships_for_a_bundled_model_is_named(method: str):
    """The choice drafts the same where the model goes by another name."""
    for family, candidate in each(families(method, "sample")):
        assert Spec.parse(candidate.spec).path == Spec.parse(family.name).path == BUNDLED_DRAFTS["sample"][method]
    assert Spec.parse(families(f"{method}:other", "sample")[0].name).path == "other"
    assert Spec.parse(families(method, ALONE)[0].name).path is None


def test_what_is_tried_where_nothing_is_named():
    assert default_drafters(ALONE) == ["prompt_lookup"]
    assert default_drafters("sample") == ["prompt_lookup", *BUNDLED_DRAFTS["sample"], "hybrid:eagle3"]


def test_auto_is_the_default_of_the_other_commands():
    assert families("auto", ALONE) == families("prompt_lookup", ALONE)
    assert families("auto", "sample") == families("hybrid:eagle3", "sample")
    for name in ("auto", *default_drafters("sample")):
        assert families(name, "sample")


def test_hybrid_has_the_sizes_of_its_inner_drafter():
    options = "prompt_lookup_num_tokens=9"
    for spec, inner in (
        ("hybrid:eagle3", "eagle3"),
        ("hybrid:[eagle3:sample-eagle3,rope_theta=5.0]", "eagle3,rope_theta=5.0"),
    ):
        found = families(f"{spec},{options}", "sample")
        alone = families(inner, "sample")
        assert [each.name for each in found] == [f"hybrid:[{each.name}],{options}" for each in alone]
        assert [each.probe for each in found] == [f"hybrid:[{each.probe}],{options}" for each in alone]
        for family, own in zip(found, alone, strict=True):
            assert [each.shape for each in family.candidates] == [each.shape for each in own.candidates]
            for candidate, within in zip(family.candidates, own.candidates, strict=True):
                assert Spec.parse(candidate.spec).drafting == Spec.parse(within.spec)
                assert Spec.parse(candidate.spec).options.prompt_lookup_num_tokens == 9


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("eagle9", "Unknown drafter 'eagle9'"),
        ("eagle3:H,node=3", "Unknown option of eagle3 'node'"),
        ("eagle3:H,nodes=many", "nodes"),
        ("eagle3:H,nodes=0", "must be 1 or more"),
        ("medusa:H,tree=oak", "Unknown tree 'oak'"),
        ("none", "none is plain decoding"),
        ("hybrid", "has not one drafter inside"),
        ("hybrid:prompt_lookup+eagle3", "has not one drafter inside"),
        ("bandit:prompt_lookup", "chooses among its own drafters"),
        ("online:[draft_model:x]", "trains its inner drafter"),
        ("", "Unknown drafter ''"),
    ],
)
def test_what_cannot_be_is_an_error(spec: str, sentence: str):
    with pytest.raises(OptionError) as error:
        families(spec, ALONE)
    assert sentence in str(error.value)
