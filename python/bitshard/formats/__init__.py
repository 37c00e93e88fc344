"""What packed bytes are: kinds, states, tables, and the words for where a weight is."""
