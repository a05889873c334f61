"""Words that pages and examples do not use, as patterns, and what to write in place of each."""

__all__ = ["INSTEAD"]

# What to write in place of words that readers outside of this project do not use so.
INSTEAD = {
    r"\bof which\b": "a relative clause with its noun, or a new sentence",
    r"\bas ever\b": "as usual, or nothing",
    r"\bat the price of\b": "the cost, with its unit",
    r"(?<!there )\bis no (?!longer\b|more\b|need\b|reason\b)[a-z]": "is not a",
    r"(?<!by )\bhand(s|ed|ing)? (on|over)\b": "send, pass",
    r"\b(goes|go|went|going) on\b": "continue",
    r"\bcuts?\b(?! off)(?=.*\b(layer|rank|model|stage|outputs|inputs)s?\b)": "shard, split",
    r"\bbut for\b": "except for",
    r", say[,.;)]| say\)": "for example",
    r"\bat hand\b": "available",
    r"\bthe dearest\b": "the most expensive, the bottleneck",
    r"\bwhole on every rank\b": "replicated",
    r"\bas it comes\b": "at its defaults",
    r"\bpieces?\b": "shard, part, passage, microbatch",
    r"(?<!virtual )\bmachines\b": "nodes",
    r"(?<!\d )\bother (samples|entries|sketches)\b": "different",
    r"\bin another (order|layout|way)\b": "in a different",
    r"\b(is|are)\W+(not\W+)?what (?!to\b)": "the noun",
    r"(^|[.:;] )What (is|was|are|were) \w+ (is|are|was|were|on|by|in)\b": "the noun",
    r"\bwhat it takes\b(?! to)": "memory, time, bytes",
    r"\bcosts? what\b": "includes the time of",
    r"\bbesides(?=[.,;:]| \()": "also",
    r"\bat worst\b": "at most",
    r"\bin the median\b": "a median of",
    r"\b(one|to) another in silence\b": "silently",
}
