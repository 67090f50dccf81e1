"""LMCache's chunks in the sidecar: L2Adapter for its server mode, StoragePlugin for its in-process mode.

Each is imported by LMCache from its module, l2_adapter or storage_plugin.
"""
