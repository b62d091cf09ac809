"""GPUs: the table, a user's own file, and what the data sheets say of a card."""
