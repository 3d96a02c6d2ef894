//! The socket for processes that open memory of this one ([`Door`]): made when it first shares memory, and served by the control server.

use std::sync::{Arc, Mutex};
use vramctl_control::door::Door;
use vramctl_host::{Held, PerProcess, Unpoison};

/// The number, and the socket; `None` while it is closed.
type Made = (Door, Option<Arc<Held>>);

static DOOR: PerProcess<Mutex<Option<Made>>> = PerProcess::new(Mutex::default);

/// Its number, for handles. `None` if it cannot be made: the process is then reached by the directory of the sockets alone.
pub fn number() -> Option<Door> {
    let mut door = DOOR.get().lock().unpoisoned();
    if door.is_none() {
        let made = Door::random().and_then(|number| Ok((number, Some(Arc::new(number.listen()?)))));
        *door = made.inspect_err(|error| log::debug!("no socket without a file: {error}")).ok();
    }
    door.as_ref().map(|(number, _)| *number)
}

/// The socket, if there is one. The program may have closed it: then it is made again.
pub fn socket() -> Option<Arc<Held>> {
    let mut door = DOOR.existing()?.lock().unpoisoned();
    let (number, socket) = door.as_mut()?;
    if socket.as_ref().is_none_or(|socket| socket.get().is_err()) {
        *socket = Some(Arc::new(number.listen().ok()?));
    }
    socket.clone()
}

/// Closes it until it is asked for again.
pub fn close() {
    if let Some(door) = DOOR.existing() {
        door.lock().unpoisoned().iter_mut().for_each(|(_, socket)| *socket = None);
    }
}
