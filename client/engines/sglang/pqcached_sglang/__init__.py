"""SGLang's HiCache with its pages in the sidecar; SGLang imports the class from the module hicache."""
