"""A process that starts a child, writes the child's id and sleeps, whatever its trainer says."""

import subprocess
import time

if __name__ == "__main__":
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
