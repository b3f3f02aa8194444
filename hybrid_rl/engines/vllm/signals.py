"""Makes the engine process notice SIGTERM at any time. Runs in vLLM's process."""

import os
import signal
import threading


def handle_sigterm_in_thread() -> None:
    """Call the handler of SIGTERM in a thread of its own as soon as the signal arrives; called in the main thread.

    Python calls a handler in the main thread, between two instructions. A signal that arrives just before the main
    thread blocks, or that the kernel delivers to another thread, does not end a wait which has no timeout: vLLM's main
    thread, which waits for its input queue, would notice SIGTERM only with the next request. Python's signal code in C,
    however, writes to the wakeup descriptor whichever thread receives the signal and whatever the main thread does.

    vLLM's handler sets a state and an event, upon which a thread of vLLM wakes the main thread. A second call of it,
    in the main thread, changes nothing.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python demands of the wakeup descriptor
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            number = os.read(reader, 1)[0]
            handler = signal.getsignal(number)
            if number == signal.SIGTERM and callable(handler):  # the default action, set at the end, is no callable
                handler(number, None)

    threading.Thread(target=watch, name="handle_sigterm", daemon=True).start()
