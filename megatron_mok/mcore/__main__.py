"""`python -m megatron_mok.mcore`: what the dispatcher `mok` refuses, as a Markdown table."""

from .refusals import markdown

print(markdown(), end="")
