"""One look at a file finds every problem, and says what in it changes nothing."""

from mizzen.config.describe import examine


def test_a_good_configuration_has_no_problem_and_is_returned():
    found = examine({"train_batch_size": 8})
    assert found.config is not None
    assert found.config.train_batch_size == 8
    assert (found.problems, found.notes) == ((), ())


def test_unknown_keys_and_wrong_values_are_found_together():
    found = examine(
        {
            "train_batch_sise": 8,
            "gradient_clipping": "strong",
            "zero_optimization": {"stage": 4, "offload_optimizer": {"devise": "cpu"}},
            "steps_per_print": -1,
        }
    )
    assert found.config is None
    text = "\n".join(found.problems)
    assert "train_batch_sise: unknown key; did you mean 'train_batch_size'?" in text
    assert "zero_optimization.offload_optimizer.devise: unknown key; did you mean 'device'?" in text
    assert "zero_optimization.stage: 4 is not one of [0, 1, 2, 3]" in text
    assert 'gradient_clipping: "strong" is not a number' in text
    assert "steps_per_print: -1 is below the least allowed value, 1" in text
    assert len(found.problems) == 5


def test_a_misspelt_key_is_not_also_a_missing_one():
    found = examine({"optimizer": {"typ": "Adam"}})
    assert found.problems == ("optimizer.typ: unknown key; did you mean 'type'?",)


def test_a_key_that_is_only_missing_is_a_problem():
    (problem,) = examine({"optimizer": {"params": {}}}).problems
    assert problem.startswith("optimizer.type: ")


def test_a_key_with_dots_deep_inside_is_found():
    found = examine({"zero_optimization": {"a.b": 1, "stage": 9}})
    assert [problem.split(":")[0] for problem in found.problems] == ["zero_optimization.a.b", "zero_optimization.stage"]


def test_a_source_that_cannot_be_read_is_one_problem():
    assert examine("{").problems[0].startswith("the given text is neither JSON nor HJSON")


def test_old_keys_and_keys_without_effect_are_noted():
    found = examine({"zero_optimization": {"stage": 2, "cpu_offload": True, "round_robin_gradients": True}})
    assert found.problems == ()
    assert sorted(found.notes) == [
        "zero_optimization.cpu_offload: old key; use zero_optimization.offload_optimizer",
        "zero_optimization.round_robin_gradients: no effect: every rank owns an equal share of each bucket",
    ]


def test_a_key_without_effect_that_holds_its_default_is_not_noted():
    assert examine({"zero_optimization": {"round_robin_gradients": False}}).notes == ()


def test_the_source_is_not_changed():
    source = {"train_batch_sise": 8, "zero_optimization": {"cpu_offload": True}}
    examine(source)
    assert source == {"train_batch_sise": 8, "zero_optimization": {"cpu_offload": True}}
