import functools
import json
import statistics

import numpy as np
import pytest
import torch
from torch import nn

import fedcat
from fedcat.config.sweep import _shown
from fedcat.core.errors import SettingError
from fedcat.runs.comparison import _file_names

SHORT = {"dataset": "digits", "clients": 20, "rounds": 3, "epochs": 1, "evaluate_every": 1}


def test_a_run_in_a_comparison_is_the_run_alone():
    lines = fedcat.compare(["fedavg", "fedcat"], seeds=2, exact=True, **SHORT)
    assert [line.label for line in lines] == ["fedavg", "fedcat"]
    for line in lines:
        for seed, result in enumerate(line.results):
            alone = fedcat.run(method=line.label, seed=seed, exact=True, **SHORT)
            assert [r.accuracy for r in alone.history] == [r.accuracy for r in result.history]
            assert torch.equal(alone.model().head.weight, result.model().head.weight)


def test_figures_are_means_and_deviations_over_seeds():
    (line,) = fedcat.compare(["fedavg"], seeds=[3, 8, 5], **SHORT)
    assert [r.settings.seed for r in line.results] == [3, 8, 5]
    best = [max(r.accuracies) for r in line.results]
    assert line.mean_std("best") == (statistics.fmean(best), statistics.stdev(best))
    assert fedcat.compare(["fedavg"], seeds=1, **SHORT)[0].mean_std("best")[1] is None


def test_sweeps_go_through_all_combinations_that_a_method_knows():
    made = fedcat.Comparison(["fedavg", "fedcat"], seeds=1, sweep={"alpha": [0.3, 1.0], "epsilon": [0.0, 1.0]}, **SHORT)
    assert made.labels == [
        "fedavg alpha=0.3",
        "fedavg alpha=1.0",
        "fedcat alpha=0.3 epsilon=0.0",
        "fedcat alpha=0.3 epsilon=1.0",
        "fedcat alpha=1.0 epsilon=0.0",
        "fedcat alpha=1.0 epsilon=1.0",
    ]
    assert made.runs[3].settings.options["fedcat"]["epsilon"] == 1.0
    assert made.runs[3].method.selector.epsilon == 1.0
    assert made.runs[0].settings.partition_options == {"alpha": 0.3}


def test_ablations_are_settings_of_fedcat():
    made = fedcat.Comparison(["fedcat", "fedcat-gc", "fedcat-dc"], seeds=1, **SHORT)
    lengths = [p.method.length for p in made.runs]
    kinds = [type(p.method.selector).__name__ for p in made.runs]
    assert lengths == [2, 1, 2]
    assert kinds == ["GroupedSelector", "GroupedSelector", "FunctionSelector"]


def test_a_users_method_can_be_compared_and_swept(tmp_path):
    class Shrunk(fedcat.FedAvg):
        def __init__(self, context, *, factor: float = 1.0):
            super().__init__(context)
            self.factor = factor

        def reduce(self, hops, replies):
            return super().reduce(hops, replies) * self.factor

    lines = fedcat.compare(
        ["fedavg", Shrunk], seeds=1, exact=True, sweep={"factor": [1.0, 0.0]}, out=tmp_path / "c", **SHORT
    )
    assert [line.label for line in lines] == ["fedavg", "Shrunk factor=1.0", "Shrunk factor=0.0"]
    assert lines[0].results[0].accuracies == lines[1].results[0].accuracies
    assert torch.count_nonzero(lines[2].results[0].model().head.weight) == 0
    names = {p.name for p in (tmp_path / "c").iterdir()}
    assert names == {"comparison.json", "fedavg-seed0", "Shrunk-factor=1.0-seed0", "Shrunk-factor=0.0-seed0"}
    stored = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [line["label"] for line in stored] == [line.label for line in lines]
    assert stored[0]["best"]["mean"] == lines[0].mean_std("best")[0]


def test_runs_of_one_name_are_told_apart(tmp_path):
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(2)]
    lines = fedcat.compare(["fedavg"], seeds=1, sweep={"net": nets}, out=tmp_path / "c", **SHORT)
    assert [line.label for line in lines] == ["fedavg net=Sequential", "fedavg net=Sequential #2"]
    assert len(list((tmp_path / "c").iterdir())) == 3
    assert lines[0].results[0].accuracies != lines[1].results[0].accuracies


def test_rules_that_are_no_dataclasses_are_told_apart():
    class Pull(fedcat.LocalRule):
        def __init__(self, mu):
            object.__setattr__(self, "mu", mu)

        def gradient(self, g, p, start, sent, memory):
            return g + self.mu * (p - start)

    class Pulled(fedcat.FedAvg):
        def __init__(self, context, mu=0.0):
            super().__init__(context)
            self.rule = Pull(mu)

    lines = fedcat.compare([Pulled], seeds=1, sweep={"mu": [0.0, 2.0]}, **{**SHORT, "epochs": 5})
    first, second = (line.results[0].model().head.weight for line in lines)
    assert not torch.equal(first, second)


def test_long_labels_have_folders_of_their_own(tmp_path):
    class Worded(fedcat.FedAvg):
        def __init__(self, context, words=""):
            super().__init__(context)

    sweep = {"words": ["x" * 300 + "a", "x" * 300 + "b"]}
    fedcat.compare([Worded], seeds=1, sweep=sweep, out=tmp_path / "c", **SHORT)
    assert len([p for p in (tmp_path / "c").iterdir() if p.is_dir()]) == 2


def test_methods_may_be_one_text():
    assert fedcat.Comparison("fedavg, fedcat", seeds=1, **SHORT).labels == ["fedavg", "fedcat"]


def test_seeds_and_swept_values_may_be_arrays():
    made = fedcat.Comparison(["fedavg"], seeds=np.arange(2), sweep={"alpha": np.array([0.5, 1.0])}, **SHORT)
    assert made.seeds == [0, 1]
    assert [p.settings.partition_options["alpha"] for p in made.runs] == [0.5, 0.5, 1.0, 1.0]


def test_a_partial_method_has_its_functions_name():
    lines = fedcat.compare([functools.partial(fedcat.FedCat, epsilon=1.0)], seeds=1, **SHORT)
    assert lines[0].label == "FedCat"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": []}, "methods must name at least one method"),
        ({"methods": ["fedavg", "fedcatt"]}, "unknown method 'fedcatt': did you mean 'fedcat'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"sweep": {"alhpa": [1]}}, "unknown sweep 'alhpa': did you mean 'alpha'"),
        ({"sweep": {"alpha": [0.5, -1]}}, "alpha must be > 0, got -1"),
        ({"sweep": {"seed": [1]}}, "unknown sweep 'seed'"),
        ({"seed": "first"}, "seed must be an integer, got 'first'"),
        ({"seeds": []}, "seeds must name at least one seed and each once"),
        ({"seeds": [1, 1]}, "seeds must name at least one seed and each once"),
        ({"sweep": {"fraction": [0.1, 0.5]}, "per_round": 3}, "per_round must not be set if fraction is swept"),
        ({"sweep": {"lr": 0.1}}, "sweep of lr must be a list of values, got 0.1"),
        ({"sweep": {"threads": [1, 2]}}, "unknown sweep 'threads'"),
        ({"sweep": {"alpha": []}}, "sweep of alpha must list at least one value"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_written(given, message, tmp_path):
    with pytest.raises(SettingError, match=message):
        fedcat.compare(**{"methods": ["fedavg", "fedcat"], "out": tmp_path / "c", **SHORT, **given})
    assert not (tmp_path / "c").exists()


def test_tables_that_are_none_are_said():
    for name in ("options", "dataset_options"):
        with pytest.raises(SettingError, match=f"{name} must be a table of options, got 'x'"):
            fedcat.compare(["fedavg"], **{name: "x"})
    with pytest.raises(SettingError, match="options of method 'fedcat' must be a table, got 5"):
        fedcat.compare(["fedcat"], options={"fedcat": 5}, sweep={"epsilon": [0.1]})


def test_labels_that_look_alike_in_a_file_name_are_told_apart():
    assert _file_names(["a b", "a/b", "ä", "ö"]) == ["1-a-b", "2-a-b", "ä", "ö"]
    assert _shown(None) == "None"
    assert _shown([0.5, "x"]) == "0.5+x"
    assert _shown([]) == "none"


def test_differences_are_paired_by_seed(tmp_path):
    first, other = fedcat.compare(["fedavg", "fedprox"], [4, 2], out=tmp_path / "c", **SHORT)
    wanted = [b.best - a.best for a, b in zip(first.results, other.results, strict=True)]
    assert other.differences(first, "best") == wanted
    stored = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert stored[1]["differences"] == {
        "to": "fedavg",
        "best": wanted,
        "last_five": other.differences(first, "last_five"),
        "final": other.differences(first, "final"),
    }
    assert stored[0]["differences"]["best"] == [0.0, 0.0]


def test_one_seed_has_no_deviation_in_the_file(tmp_path):
    fedcat.compare(["fedavg"], 1, out=tmp_path / "c", **SHORT)
    (line,) = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert line["best"]["std"] is None
    assert line["best"]["mean"] > 0


def test_the_figures_of_a_comparison_are_those_of_its_runs():
    (line,) = fedcat.compare(["fedavg"], 2, **{**SHORT, "rounds": 7})
    plain = line.as_dict(line)
    for figure, value in (
        ("best", lambda r: max(r.accuracies)),
        ("last_five", lambda r: statistics.fmean(r.accuracies[-5:])),
        ("final", lambda r: r.accuracies[-1]),
    ):
        found = [value(result) for result in line.results]
        assert plain[figure] == {"mean": statistics.fmean(found), "std": statistics.stdev(found)}
        assert len(line.results[0].accuracies) == 7
    traffic = [r.history[-1].up + r.history[-1].down for r in line.results]
    assert plain["bytes"] == statistics.fmean(traffic)
    assert plain["relative_traffic"] == pytest.approx(1.0)
    assert plain["seconds"] == statistics.fmean(r.summary.seconds for r in line.results)
    assert [run["seed"] for run in plain["runs"]] == [0, 1]


def test_an_option_or_local_setting_of_one_method_reaches_it_alone():
    options = {"scaffold": {"clip": 10.0, "variant": "plain"}, "fedavg": {"lr": 0.02, "epochs": 2}}
    made = fedcat.Comparison(["fedavg", "scaffold"], 1, options=options, **SHORT)
    avg, scaffold = (run.settings for run in made.runs)
    assert (avg.clip, scaffold.clip) == (None, 10.0)
    assert (avg.lr, scaffold.lr) == (0.02, 0.05)
    assert (avg.epochs, scaffold.epochs) == (2, 1)
    assert scaffold.options["scaffold"] == {"variant": "plain", "weighting": "equal"}
    assert [run.task.clip for run in made.runs] == [None, 10.0]


def test_options_of_a_method_that_is_not_compared_are_noted():
    made = fedcat.Comparison(["fedavg"], 1, options={"scaffold": {"clip": 10.0}}, **SHORT)
    assert made.notes == ["options of scaffold have no effect: it is not among the methods"]


def test_a_bad_local_setting_of_one_method_is_refused():
    with pytest.raises(SettingError, match="clip must be > 0, got -1"):
        fedcat.Comparison(["fedavg", "scaffold"], 1, options={"scaffold": {"clip": -1.0}}, **SHORT)


def test_equal_values_of_a_sweep_are_refused():
    with pytest.raises(SettingError, match=r"sweep of lr must list different values, got 0\.1 twice"):
        fedcat.Comparison(["fedavg"], 1, sweep={"lr": [0.1, 0.2, 0.1]}, **SHORT)


def test_a_refused_comparison_leaves_no_directory(tmp_path):
    with pytest.raises(SettingError, match="selector must return"):
        fedcat.compare(["fedavg"], 1, selector=lambda round, rng, samples, k: [], out=tmp_path / "a" / "b", **SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_variant_is_short_in_print():
    one, two = (fedcat.compare(["fedavg"], seeds, **SHORT)[0] for seeds in (1, 2))
    assert repr(one) == f"<VariantResult: fedavg, 1 seed, last five accuracy {one.mean_std('last_five')[0]:.4f}>"
    assert " ± " in repr(two)


def test_what_is_set_for_one_method_cannot_be_swept():
    for options, sweep in (
        ({"scaffold": {"lr": 0.1}}, {"lr": [0.01, 0.05]}),
        ({"fedprox": {"mu": 0.3}}, {"mu": [0.1, 1.0]}),
    ):
        (name,) = sweep
        with pytest.raises(SettingError, match=f"{name} must be set or swept, got both"):
            fedcat.Comparison(["fedavg", "scaffold", "fedprox"], 1, sweep, options=options, **SHORT)


def test_a_flag_beats_a_files_table_and_a_table_beats_its_own_layer(tmp_path):
    (tmp_path / "s.toml").write_text("lr = 0.3\n[options.fedavg]\nlr = 0.1\n")
    builder = fedcat.Comparison(["fedavg", "fedprox"], 1, settings=tmp_path / "s.toml", **SHORT)
    assert [run.settings.lr for run in builder.runs] == [0.1, 0.3]
    made = fedcat.Comparison(["fedavg", "fedprox"], 1, settings=tmp_path / "s.toml", lr=0.02, **SHORT)
    assert [run.settings.lr for run in made.runs] == [0.02, 0.02]
    options = {"fedprox": {"lr": 0.5}}
    made = fedcat.Comparison(["fedavg", "fedprox"], 1, settings=tmp_path / "s.toml", lr=0.02, options=options, **SHORT)
    assert [run.settings.lr for run in made.runs] == [0.02, 0.5]
    made = fedcat.Comparison(["fedavg"], 1, {"lr": [0.01, 0.05]}, settings=tmp_path / "s.toml", **SHORT)
    assert [run.settings.lr for run in made.runs] == [0.01, 0.05]


def test_options_of_a_class_reach_it_in_a_comparison():
    class Mine(fedcat.FedAvg):
        pass

    made = fedcat.Comparison(["fedavg", Mine], 1, options={"Mine": {"lr": 0.2}}, **SHORT)
    assert [run.settings.lr for run in made.runs] == [0.05, 0.2]
    with pytest.raises(SettingError, match="unknown method in options 'Mein': did you mean 'Mine'"):
        fedcat.Comparison(["fedavg", Mine], 1, options={"Mein": {"lr": 0.2}}, **SHORT)


@pytest.mark.parametrize("run", [fedcat.run, lambda **given: fedcat.compare(["fedavg"], 1, **given)])
def test_a_setting_among_the_options_of_a_method_gets_a_hint(run):
    with pytest.raises(SettingError, match=r"lr is a setting, not an option: use --lr"):
        run(method_options={"lr": 0.3}, **SHORT)
