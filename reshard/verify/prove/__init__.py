"""`reshard prove`: a run that is killed and resumed, held against one that is not."""
