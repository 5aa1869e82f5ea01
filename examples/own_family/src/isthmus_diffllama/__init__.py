"""DiffLlama for isthmus: the example of a family package of one's own."""
