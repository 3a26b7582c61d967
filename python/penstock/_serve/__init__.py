"""``penstock serve``: OpenAI's API over ``penstock.LLM``. Only its program imports what the extra ``penstock[serve]`` brings."""
