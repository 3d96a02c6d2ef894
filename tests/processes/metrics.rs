//! `vramctl metrics`, with real programs on a simulated machine.
// The numbers are whole.
#![allow(clippy::float_cmp)]

use crate::common;
use crate::common::machine::{Killed, Machine};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// The sum of the samples of a metric with these labels.
#[track_caller]
fn sum(page: &str, metric: &str, labels: &[&str]) -> f64 {
    let is_meant = |line: &&str| line.split(['{', ' ']).next() == Some(metric) && labels.iter().all(|label| line.contains(label));
    let samples: Vec<_> = page.lines().filter(is_meant).collect();
    assert!(!samples.is_empty(), "no {metric} {labels:?} in\n{page}");
    samples.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

/// Prometheus' own opinion, where it is installed.
fn check(page: &str) {
    let promtool = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".into());
    let started =
        Command::new(promtool).args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut child) = started else { return eprintln!("not checked: there is no promtool (Debian, Ubuntu: apt-get install prometheus)") };
    child.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let told = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        told.status.success() && told.stdout.is_empty() && told.stderr.is_empty(),
        "{}{}{page}",
        text(&told.stdout),
        text(&told.stderr)
    );
}

#[test]
fn a_page_has_the_processes_memory_and_operations() {
    let machine = Machine::new();
    let mut ranks = machine.job::<2>("engine");
    let _other = machine.engine("other");
    let page = || machine.vramctl("metrics").expect(0, "", "").out;
    let before = page();
    check(&before);
    let of = r#"name="engine""#;
    let managed = sum(&before, "vramctl_managed_bytes", &[of]);
    assert_eq!(sum(&before, "vramctl_managed_bytes", &[of, r#"state="paused""#]), 0.0);
    assert_eq!(sum(&before, "vramctl_operations_total", &[of]), 0.0);
    assert_eq!(sum(&before, "vramctl_process_up", &[]), 3.0);
    let in_use = |page: &str| (sum(page, "vramctl_ledger_bytes", &[]), sum(page, "vramctl_gpu_used_bytes", &[]));
    assert!(in_use(&before).0 == in_use(&before).1 && in_use(&before).0 > managed, "{before}");

    for _ in 0..2 {
        machine.vramctl("pause --name engine").expect(0, "", "");
        machine.vramctl("resume --name engine").expect(0, "", "");
    }
    machine.vramctl("pause --name engine").expect(0, "", "");
    let paused = page();
    check(&paused);
    assert_eq!(sum(&paused, "vramctl_managed_bytes", &[of, r#"state="paused""#]), managed);
    assert_eq!(sum(&paused, "vramctl_managed_bytes", &[of, r#"state="active""#]), 0.0);
    assert_eq!(sum(&paused, "vramctl_backup_bytes", &[of, r#"place="host""#]), managed);
    assert_eq!(sum(&paused, "vramctl_process_held", &[]), 2.0);
    let (pause, resume) = (r#"operation="pause""#, r#"operation="resume""#);
    assert_eq!(sum(&paused, "vramctl_operations_total", &[of, pause]), 6.0, "in each process");
    assert_eq!(sum(&paused, "vramctl_operations_total", &[of, resume]), 4.0);
    for (operation, count) in [(pause, 6.0), (resume, 4.0)] {
        assert_eq!(sum(&paused, "vramctl_operation_duration_seconds_count", &[of, operation]), count);
        assert_eq!(sum(&paused, "vramctl_operation_duration_seconds_bucket", &[of, operation, r#"le="+Inf""#]), count);
        assert_eq!(sum(&paused, "vramctl_operation_duration_seconds_bucket", &[of, operation, r#"le="300""#]), count);
        let seconds = sum(&paused, "vramctl_operation_seconds_total", &[of, operation]);
        assert!((sum(&paused, "vramctl_operation_duration_seconds_sum", &[of, operation]) - seconds).abs() < 1e-6);
    }
    assert_eq!(sum(&paused, "vramctl_operation_bytes_total", &[of, pause]), 3.0 * managed);
    assert_eq!(sum(&paused, "vramctl_operation_contents_bytes_total", &[of, pause, r#"fate="copied""#]), 3.0 * managed);
    assert!(sum(&paused, "vramctl_operation_stage_seconds_total", &[of, resume, r#"stage="restore""#]) > 0.0);
    let seconds = sum(&paused, "vramctl_operation_seconds_total", &[of, pause]);
    let stages = sum(&paused, "vramctl_operation_stage_seconds_total", &[of, pause]);
    assert!(0.0 < stages && stages <= seconds, "{stages} of {seconds}");
    assert_eq!(sum(&paused, "vramctl_operations_total", &[r#"name="other""#]), 0.0);

    // Nothing to be done is not an operation, and a failed one changes nothing.
    machine.vramctl("pause --name engine").expect(0, "nothing to do", "");
    machine.vramctl("pause --name other --registered refuse --backup tape").expect(2, "", "");
    let after = page();
    assert_eq!(sum(&after, "vramctl_operations_total", &[of, pause]), 6.0);
    let hog = machine.start_with("hog", "engine", |command| _ = command.args(["--weights-mib", "928", "--kv-mib", "8"]));
    machine.vramctl("resume --name engine").expect(4, "", "too little memory");
    let after = page();
    check(&after);
    assert!(sum(&after, "vramctl_operation_failures_total", &[of, resume, r#"code="device_memory""#]) >= 1.0);
    assert_eq!(sum(&after, "vramctl_operation_failures_total", &[of, pause]), 0.0);
    assert_eq!(sum(&after, "vramctl_operations_total", &[of, resume]), 4.0);
    drop(hog);
    machine.vramctl("resume --name engine").expect(0, "", "");
    ranks.iter_mut().for_each(common::machine::Program::verify);
}

/// Counted wherever it is requested: in steps, at once, and by the program itself.
#[test]
fn a_pause_that_is_undone_counts_as_failed() {
    let machine = Machine::new();
    let rank = machine.engine("engine");
    let mut client = machine.connect(&rank);
    client.step(&serde_json::json!({"request": "hold"}), None, "held");
    client.step(&serde_json::json!({"request": "abort"}), None, "error");
    client.step(&serde_json::json!({"request": "pause", "tags": ["nonsense"]}), None, "error");
    client.step(&serde_json::json!({"request": "pause"}), None, "done");
    client.step(&serde_json::json!({"request": "resume"}), None, "done");
    let status = client.ask(&serde_json::json!({"request": "status"}));
    assert_eq!(status["totals"]["pause"]["failed"], serde_json::json!({"aborted": 1, "unknown_tag": 1}), "{status}");
    assert_eq!((&status["totals"]["pause"]["done"], &status["totals"]["resume"]["done"]), (&1.into(), &1.into()), "{status}");
    assert_eq!(status["totals"]["pause"]["bytes"], status["totals"]["resume"]["bytes"], "{status}");
}

#[test]
fn a_stopped_process_is_down_and_the_others_are_reported() {
    let machine = Machine::new();
    let (stopped, other) = (machine.engine("stopped"), machine.engine("other"));
    stopped.stop();
    let page = machine.vramctl("metrics").expect(0, "", "").out;
    stopped.go_on();
    check(&page);
    assert_eq!(sum(&page, "vramctl_process_up", &[&format!(r#"pid="{}""#, stopped.pid())]), 0.0);
    assert_eq!(sum(&page, "vramctl_process_up", &[&format!(r#"pid="{}""#, other.pid())]), 1.0);
}

#[test]
fn a_file_for_node_exporter_holds_the_page() {
    let machine = Machine::new();
    let _engine = machine.engine("engine");
    let path = machine.folder.path().join("vramctl.prom");
    machine.vramctl(&format!("metrics --textfile {}", path.display())).expect(0, "", "");
    let page = fs::read_to_string(&path).unwrap();
    check(&page);
    assert_eq!(sum(&page, "vramctl_process_up", &[]), 1.0);
    machine.vramctl("metrics --textfile /nowhere/vramctl.prom").expect(1, "", "/nowhere/vramctl.prom: No such file");
}

/// A server that ends with the test.
struct Server(#[expect(dead_code, reason = "killed when dropped")] Killed, SocketAddr);

impl Server {
    fn start(machine: &Machine) -> Self {
        let mut command = machine.cli(&["metrics", "--listen", "0"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening: http://").and_then(|rest| rest.strip_suffix("/metrics"));
        let address: SocketAddr = address.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        assert!(address.ip().is_loopback());
        Self(Killed(child), address)
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.1).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn ask(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may have answered and disconnected before it has read everything.
        let _ = stream.write_all(request).and_then(|()| stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[track_caller]
    fn serves(&self) -> String {
        let answer = self.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n");
        let (head, page) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
        page.to_owned()
    }
}

#[test]
fn after_any_input_the_next_client_is_served() {
    let machine = Machine::new();
    let server = Server::start(&machine);
    // Before there is any process, and as they come.
    check(&server.serves());
    let _engine = machine.engine("engine");
    let page = server.serves();
    check(&page);
    assert_eq!(sum(&page, "vramctl_process_up", &[]), 1.0);

    for (request, wanted) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP/1.1 404 "),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 "),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "HTTP/1.1 408 "),
        (b"\0\xff\r\n\r\n", "HTTP/1.1 400 "),
        (b"", "HTTP/1.1 408 "),
    ] {
        let answer = server.ask(request);
        assert!(answer.starts_with(wanted), "{answer}");
    }
    let answer = server.ask(&vec![b'a'; 1 << 20]);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    // Clients that send nothing, that disconnect at once, and more clients than the limit.
    let silent: Vec<_> = (0..8).map(|_| server.connect()).collect();
    (0..50).for_each(|_| drop(server.connect()));
    let clients: Vec<_> = (0..40).map(|_| server.connect()).collect();
    for mut client in clients {
        let _ = client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        // On a busy machine, the last ones have said nothing for seconds when it is their turn.
        let is_one_of = |codes: [&str; 3]| codes.iter().any(|code| answer.starts_with(&format!("HTTP/1.1 {code} ")));
        assert!(answer.is_empty() || is_one_of(["200", "408", "503"]), "{answer}");
    }
    drop(silent);
    // Until it has noticed that they have left, it is too busy.
    common::eventually("the next client is served", || server.ask(b"GET /metrics HTTP/1.1\r\n\r\n").contains("vramctl_process_up"));
}

/// They make room, the oldest first.
#[test]
fn idle_clients_keep_nobody_out() {
    let machine = Machine::new();
    let server = Server::start(&machine);
    let mut idle = Vec::new();
    for _ in 0..3 {
        idle.extend((0..20).map(|_| server.connect()));
        check(&server.serves());
    }
    let half = server.connect();
    (&half).write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    check(&server.serves());
}

/// Two at the same time get a page each.
#[test]
fn several_clients_may_ask_at_once() {
    let machine = Machine::new();
    let _engine = machine.engine("engine");
    let server = Server::start(&machine);
    thread::scope(|scope| {
        let pages: Vec<_> = (0..4).map(|_| scope.spawn(|| server.serves())).collect();
        for page in pages {
            assert_eq!(sum(&page.join().unwrap(), "vramctl_process_up", &[]), 1.0);
        }
    });
}
