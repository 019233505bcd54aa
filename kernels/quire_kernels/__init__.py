"""One op a file: public function, torch reference, and (on a GPU) its Triton kernel."""
