"""Reading the files of a model directory, none of which is trusted."""
