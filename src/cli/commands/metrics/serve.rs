//! A web server for one page. No client can stop it: requests are limited in size and time, and connections in number.

use crate::ui::output;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use vramctl_coordinator::failure::{CommandError, Exit};
use vramctl_host::Unpoison;

/// The longest request that is read.
const LONGEST_REQUEST: usize = 8 << 10;
/// How long a client may take to send its request, and to read the page.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many clients are served at a time.
const MOST_CLIENTS: usize = 16;
/// Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves until the process is ended.
pub fn serve(address: SocketAddr, page: &(dyn Fn() -> Result<String, String> + Sync)) -> Result<Exit, CommandError> {
    let failed = |error: io::Error| CommandError::new(Exit::Failed, format!("cannot listen at {address}: {error}"));
    let listener = TcpListener::bind(address).map_err(failed)?;
    output::complain("listening", &format!("http://{}/metrics", listener.local_addr().map_err(failed)?));
    let (clients, turn) = (&Mutex::new(Clients::default()), Mutex::new(()));
    // Query the processes for one client at a time.
    let page = &|| {
        let _turn = turn.lock().unpoisoned();
        page()
    };
    thread::scope(|scope| {
        for stream in listener.incoming() {
            // Most likely out of descriptors, until clients disconnect.
            let Ok(stream) = stream else {
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let stream = Arc::new(stream);
            if !clients.lock().unpoisoned().admit(&stream) {
                let _ = stream.set_nonblocking(true).and_then(|()| (&*stream).write_all(&answer("503 Service Unavailable", "busy\n")));
                continue;
            }
            let of_thread = Arc::clone(&stream);
            let client = thread::Builder::new().name("client".into()).spawn_scoped(scope, move || {
                // Errors do not matter: the client has disconnected.
                let _ = converse(&of_thread, clients, page);
                clients.lock().unpoisoned().forget(&of_thread);
            });
            if client.is_err() {
                clients.lock().unpoisoned().forget(&stream);
            }
        }
    });
    Ok(Exit::Done)
}

/// The connected clients.
#[derive(Default)]
struct Clients {
    /// Those from which something is expected, in order of arrival. They make room for others.
    idle: VecDeque<Arc<TcpStream>>,
    /// How many are being answered.
    answered: usize,
}

impl Clients {
    /// Admits a client, if necessary in place of the one that has been idle for the longest time.
    fn admit(&mut self, stream: &Arc<TcpStream>) -> bool {
        if self.idle.len() + self.answered >= MOST_CLIENTS {
            let Some(oldest) = self.idle.pop_front() else { return false };
            // Its thread ends.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.idle.push_back(Arc::clone(stream));
        true
    }

    /// Whether it was there.
    fn forget(&mut self, stream: &Arc<TcpStream>) -> bool {
        let place = self.idle.iter().position(|idle| Arc::ptr_eq(idle, stream));
        place.and_then(|place| self.idle.remove(place)).is_some()
    }
}

/// One request, one answer.
fn converse(stream: &Arc<TcpStream>, clients: &Mutex<Clients>, page: &dyn Fn() -> Result<String, String>) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = read_request(stream)?;
    {
        let mut clients = clients.lock().unpoisoned();
        if !clients.forget(stream) {
            return Ok(());
        }
        clients.answered += 1;
    }
    let written = (&**stream).write_all(&respond(&request, page));
    {
        let mut clients = clients.lock().unpoisoned();
        clients.answered -= 1;
        clients.idle.push_back(Arc::clone(stream));
    }
    written?;
    stream.shutdown(Shutdown::Write)?;
    // Unread data would reset the connection and lose the answer, so read it.
    let deadline = Instant::now() + PATIENCE;
    stream.set_read_timeout(Some(PATIENCE / 10))?;
    while Instant::now() < deadline && (&**stream).read(&mut [0; 1024])? > 0 {}
    Ok(())
}

/// Reads the request up to the empty line, or until it ends.
fn read_request(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let (mut request, mut part, deadline) = (Vec::new(), [0; 1024], Instant::now() + PATIENCE);
    while request.len() < LONGEST_REQUEST && !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(count) => request.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(request)
}

/// The answer to a request.
fn respond(request: &[u8], page: &dyn Fn() -> Result<String, String>) -> Vec<u8> {
    if !request.windows(4).any(|end| end == b"\r\n\r\n") {
        return match request.len() {
            LONGEST_REQUEST.. => answer("431 Request Header Fields Too Large", "the request is too long\n"),
            _ => answer("408 Request Timeout", "no complete request\n"),
        };
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let words: Vec<_> = line.split(|byte| *byte == b' ').collect();
    let [method, target, version] = words[..] else { return answer("400 Bad Request", "not a request\n") };
    if !version.starts_with(b"HTTP/1.") {
        return answer("400 Bad Request", "not a request in HTTP/1\n");
    }
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method, path) {
        (b"GET", b"/metrics") => match page() {
            Ok(text) => answer("200 OK", &text),
            Err(why) => answer("500 Internal Server Error", &format!("{why}\n")),
        },
        (_, b"/metrics") => answer("405 Method Not Allowed\r\nAllow: GET", "only GET\n"),
        _ => answer("404 Not Found", "the metrics are at /metrics\n"),
    }
}

fn answer(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: {TEXT}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> String {
        let answer = String::from_utf8(respond(request, &|| Ok("page\n".into()))).unwrap();
        answer.lines().next().unwrap().trim_start_matches("HTTP/1.1 ").to_owned()
    }

    #[test]
    fn there_is_one_page() {
        let answer = String::from_utf8(respond(b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", &|| Ok("page\n".into()))).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("Content-Length: 5\r\nConnection: close\r\n\r\npage\n"),
            "{answer}"
        );
        assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n"), "404 Not Found");
        assert_eq!(status(b"GET /metrics/ HTTP/1.0\r\n\r\n"), "404 Not Found");
        assert_eq!(status(b"POST /metrics HTTP/1.1\r\n\r\n"), "405 Method Not Allowed");
        let failed = String::from_utf8(respond(b"GET /metrics HTTP/1.1\r\n\r\n", &|| Err("no".into()))).unwrap();
        assert!(failed.starts_with("HTTP/1.1 500 ") && failed.ends_with("\r\n\r\nno\n"), "{failed}");
    }

    #[test]
    fn what_is_not_a_request_is_refused() {
        assert_eq!(status(b"\r\n\r\n"), "400 Bad Request");
        assert_eq!(status(b"GET /metrics\r\n\r\n"), "400 Bad Request");
        assert_eq!(status(b"GET /metrics SMTP\r\n\r\n"), "400 Bad Request");
        assert_eq!(status(b"\xff\xfe\x00 \x00 \x00\r\n\r\n"), "400 Bad Request");
        assert_eq!(status(b"GET /metrics HTTP/1.1\r\n"), "408 Request Timeout");
        assert_eq!(status(&[b'x'; LONGEST_REQUEST]), "431 Request Header Fields Too Large");
        assert_eq!(status(b""), "408 Request Timeout");
    }
}
