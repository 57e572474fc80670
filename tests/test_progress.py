"""How far a run is: what --max_minutes becomes, and when it will end."""

import logging
import signal

import pytest
import yaml
from fixtures import tiny_run
from fixtures.tiny_run import assert_same_training, toy, train_here

from hf_tiny import InputError
from hf_tiny.callbacks import TrainState
from hf_tiny.progress import Forecast, duration, earlier_length, steps_within


def length(run) -> int:
    """What recipe.yaml says of it."""
    settings = yaml.safe_load((run / "recipe.yaml").read_text())
    assert settings["max_minutes"] is None
    return settings["max_steps"]


def test_steps_that_fit_into_a_time():
    assert steps_within(100, step=0.5, evaluation=0, eval_steps=0) == 200
    assert steps_within(100, step=0.5, evaluation=10, eval_steps=0) == 180  # one at the end
    assert steps_within(100, step=0.5, evaluation=10, eval_steps=20) == 90  # 45 s, four of 10 s, and one at the end
    assert steps_within(1, step=0.5, evaluation=10, eval_steps=20) == 1


def test_timing_changes_nothing_of_the_run(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "save_steps": 0}
    results = train_here(tmp_path / "timed", evaluate=True, max_minutes=0.01, **settings)
    steps = length(tmp_path / "timed")
    assert results["train_steps"] == steps
    train_here(tmp_path / "counted", evaluate=True, max_steps=steps, **settings)
    last = f"checkpoint-{steps}"
    assert_same_training(tmp_path / "timed" / last, tmp_path / "counted" / last)
    timed, counted = (tiny_run.metrics(tmp_path / name) for name in ("timed", "counted"))
    assert [line.get("loss") for line in timed] == [line.get("loss") for line in counted]


@pytest.mark.slow
def test_a_killed_run_keeps_its_length(tmp_path):
    run = tmp_path / "run"
    started = tiny_run.start_toy(run, max_minutes=0.05, pause=0.05)
    tiny_run.wait_for_step(started, run, 6)
    started.kill(signal.SIGKILL)
    started.wait()
    steps = length(run)
    ended = toy(run, max_minutes=0.05, resume_from_checkpoint="latest")
    assert ended.code == 0 and "Resumed from" in ended.err and length(run) == steps, ended.err
    assert f"--max_minutes: a run that goes on keeps its length, {steps} steps" in ended.err
    assert toy(tmp_path / "whole", max_steps=steps).code == 0
    assert_same_training(run / f"checkpoint-{steps}", tmp_path / "whole" / f"checkpoint-{steps}")


def test_the_length_of_the_run_that_is_resumed(tmp_path):
    assert earlier_length(tmp_path, None) is None and earlier_length(tmp_path, "latest") is None
    (tmp_path / "recipe.yaml").write_text("max_steps: 70")
    assert earlier_length(tmp_path, "latest") == 70
    assert earlier_length(tmp_path / "other", str(tmp_path / "checkpoint-4")) == 70
    (tmp_path / "recipe.yaml").write_text("{nothing")
    with pytest.raises(InputError, match="give the --max_steps of the run"):
        earlier_length(tmp_path, "latest")


@pytest.mark.parametrize(
    ("seconds", "said"), [(40, "40 seconds"), (720, "12 minutes"), (12_600, "3.5 hours"), (37e6, "428 days")]
)
def test_durations_are_said_as_people_do(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(("steps", "said"), [(1000, "about 33 minutes more"), (1_000_000, "about 23 days more")])
def test_a_run_says_when_it_will_end(steps, said):
    """The first steps of 100 seconds are not counted."""
    state = TrainState(step=5, max_steps=steps, seconds=300)
    forecast, texts = Forecast(state), []
    for state.step in range(6, 30):
        state.seconds += 100 if state.step <= 7 else 2
        texts.append(forecast.said(state))
    (text,) = filter(None, texts)
    assert text.startswith(f"{steps:,} steps: {said}, until 20")
    assert ("--max_minutes 60" in text) == (steps == 1_000_000)


def test_short_runs_have_points(tmp_path):
    train_here(tmp_path / "run", max_steps=6, logging_steps=None, save_steps=0)
    assert tiny_run.logged_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    train_here(tmp_path / "longer", max_steps=140, logging_steps=None, save_steps=0)
    assert tiny_run.logged_steps(tmp_path / "longer") == [1, *range(2, 141, 2)]


def test_the_bar_shows_the_loss_of_the_step(tmp_path, capsys):
    """What is logged is the mean of the steps since the last line."""
    settings = {"max_steps": 4, "save_steps": 0, "gradient_accumulation_steps": 2}
    train_here(tmp_path / "each", logging_steps=1, **settings)
    last = tiny_run.metrics(tmp_path / "each")[-1]
    capsys.readouterr()
    train_here(tmp_path / "run", logging_steps=4, **settings)
    err = capsys.readouterr().err
    assert f"loss={last['loss']:.3f}" in err and "tokens/s=" in err


def warn_in_a_step(*flags) -> None:
    def warn(trouble, state, model) -> None:
        if state.step == 3:
            logging.getLogger("hf_tiny.callbacks").warning("something is odd")

    tiny_run.Trouble.on_step_end = warn
    tiny_run.run_toy(*flags)


def test_a_warning_in_training_has_a_line_of_its_own(tmp_path):
    """It stood at the end of the bar."""
    ended = tiny_run.start(tmp_path, warn_in_a_step, "--output_dir", str(tmp_path / "run"), "--max_steps", "6").wait()
    assert ended.code == 0 and "something is odd" in ended.err.replace("\r", "\n").splitlines(), ended.err
