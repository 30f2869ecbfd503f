"""TensorRT-LLM behind the engine seam, through its LLM API; what the installed version has is looked up."""
