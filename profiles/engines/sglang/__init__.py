"""SGLang's scheduler on the virtual GPU."""
