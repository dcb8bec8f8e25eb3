"""What one grammar may cost, for the process that tries it and for the service that uses it."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

QUICK_CPU_S = 0.1
"""CPU time in which nearly every grammar is compiled: a schema of 400 optional properties, a choice
of 1,024 strings and an enum of 2,800 take 10 to 40 ms."""
MAX_CPU_S = 1.0
"""CPU time of a trial: compiling and the first mask. Not wall-clock time, so that a busy machine
refuses nothing."""
MAX_MEMORY_BYTES = 128 << 20
"""Memory of a trial. An ordinary grammar takes 1 to 5 MiB; the largest that is compiled in
``MAX_CPU_S``, a ``multipleOf`` of five digits, about 50 MiB."""

# Limits of the lexer's automaton, which grows with the answer. A form such as eleven words of any
# letters needs 20,000 to 50,000 units of fuel in a mask (5 to 10 ms), and 1,500 tokens fewer than
# 50,000 states. Compiling is not bounded by fuel: remainders by multipleOf cost none.
_STEP_LEXER_FUEL = 50_000  # a fourth of the default
_MAX_LEXER_STATES = 50_000  # a fifth of the default, 1 to 2 kB each

_NO_TOKEN = "no token of the vocabulary continues it"


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a grammar; the matcher may be in an error."""
    limits = LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def error_of(matcher: LLMatcher) -> str:
    """Returns the matcher's error in one line, or an empty string."""
    told = one_line(matcher.get_error()) if matcher.is_error() else ""
    return _NO_TOKEN if told.startswith("NoExtension") else told


def one_line(message: str) -> str:
    """Returns llguidance's message in one line of at most 400 letters, without the state and the
    backtrace that may follow it."""
    words = " ".join(message.partition("\n<")[0].split())
    return words if len(words) <= 400 else words[:397] + "..."
