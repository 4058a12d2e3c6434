def write_report(store, name):
    return ""
