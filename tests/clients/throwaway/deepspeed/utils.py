"""The logger, whose level Trainer sets."""

from mizzen.log import get_logger

logger = get_logger()
