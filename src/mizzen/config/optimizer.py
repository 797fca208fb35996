"""`optimizer` and `scheduler`: a name and its arguments. Which ones exist is known where they are built."""

from mizzen.config.section import Arguments, Flag, Name, Section, empty, no_effect


class OptimizerConfig(Section):
    """An optimizer by name."""

    type: Name
    """Name of the rule, such as AdamW or Muon; names of ours in any case, others as in torch.optim."""
    params: Arguments = empty()
    """Arguments of the rule, such as lr and betas."""
    legacy_fusion: Flag = no_effect(False, "there is one fused step, in torch")
    """Use the old fused implementation."""


class SchedulerConfig(Section):
    """A learning-rate schedule by name."""

    type: Name
    """Name of the schedule, such as WarmupCosineLR, or of a class in torch.optim.lr_scheduler."""
    params: Arguments = empty()
    """Arguments of the schedule, such as warmup_num_steps."""
