"""After a bad resume: what shape the loss has, which piece of the state that points to, and what to do."""
