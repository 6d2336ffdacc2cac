"""Help for tests and demos. Importing it, or a module of it, changes nothing."""
