"""Words that break launchers, from a seed."""

import random

PIECES = [
    *(" ", "  ", "'", '"', "`", ";", "&&", "|", "$HOME", "$(", ")", "${x}", "\n", "\t", "%n", "%h", "%%", ",", ":"),
    *("\\", "\\n", "!", "*", "?", "[a]", "{a,b}", "~", "#", "<", ">", "&", "--", "-n", "-x", "é", "日本", "\udc80"),
    *("a", "Z", "0", "/", ".", "mizzen", "--node", "EOF", "\r", "@", "\x01", "="),
    *("\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"),
]  # fmt: skip


def words(seed, count, canary):
    """So many arguments, some of which would make the canary if a shell saw them."""
    chance = random.Random(seed)
    traps = [
        f"$(touch {canary})",
        f"`touch {canary}`",
        f";touch {canary};",
        f"\ntouch {canary}\n",
        f"'; touch {canary} #",
    ]
    made = []
    for _ in range(count):
        pieces = chance.choices(PIECES, k=chance.randint(0, 8))
        if chance.random() < 0.1:
            pieces.append(chance.choice(traps))
        made.append("".join(pieces))
    return made
