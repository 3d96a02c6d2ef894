//! Inference engines, which a pause asks first.

use super::*;

/// An HTTP server that acts as an engine: `answers` has a status and a body by method and path; anything else is 404.
struct Http {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Http {
    fn new(answer: impl Fn(&str) -> (u16, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        // The thread ends with the test process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let Some(request) = lines.next() else { continue };
                let key = lines.take_while(|line| !line.is_empty()).find(|line| line.to_lowercase().starts_with("authorization:"));
                let request = request.trim_end_matches(" HTTP/1.1").to_owned();
                let (status, body) = answer(&(request.clone() + key.as_deref().unwrap_or("")));
                log.lock().unwrap().push(request);
                let length = body.len();
                let _ = write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            }
        });
        Self { address, asked }
    }

    /// A vLLM that reports these request counts, one per query; the last one repeats.
    fn vllm(running: &'static [u32], reset: (u16, &'static str)) -> Self {
        let looks = AtomicUsize::new(0);
        Self::new(move |request| match request {
            "GET /metrics" => {
                let look = looks.fetch_add(1, Ordering::Relaxed).min(running.len() - 1);
                let gauge = |name: &str, count: u32| format!("vllm:num_requests_{name}{{engine=\"0\"}} {count}.0\n");
                (200, gauge("running", running[look]) + &gauge("waiting", 0))
            }
            "POST /reset_prefix_cache" => (reset.0, reset.1.into()),
            _ => (404, String::new()),
        })
    }

    fn sglang(running: u32, flush: (u16, &'static str)) -> Self {
        Self::new(move |request| match request {
            "GET /v1/loads?include=core" => (200, json!({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]}).to_string()),
            "POST /flush_cache" => (flush.0, flush.1.into()),
            _ => (404, "{}".into()),
        })
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

/// Discarding contents without telling the engine would silently produce wrong answers later.
#[test]
fn an_engines_kv_cache_is_not_discarded_without_asking() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("vllm");
    for line in ["pause --discard", "pause kv_cache --discard"] {
        machine.vramctl(line).expect(1, "", "--engine URL");
    }
    let trainer = Fake::new(&machine, "trainer", &["weights"]);
    machine.vramctl("pause --all --discard").expect(1, "", &format!("engine (pid {}): the contents of the KV cache", engine.pid()));
    assert!(trainer.asked().is_empty());
    drop(trainer);
    let json = machine.vramctl("pause --discard --json").only_json();
    assert_eq!((&json["error"]["code"], &json["processes"]), (&json!("prefix_cache"), &json!([])));
    assert!(engine.asked().is_empty(), "a refusal comes before anything is done");
    machine.vramctl("status").expect(0, "Inference engine: vllm.", "");
    machine.vramctl("pause weights --discard").expect(0, "paused weights", "");
    machine.vramctl("pause kv_cache").expect(0, "1.00 GiB kept", "");
    machine.vramctl("resume").expect(0, "resumed", "");
    machine.vramctl("pause --discard --force").expect(0, "discarded", "");
    assert!(
        matches!(engine.asked().last(), Some(Request::Pause(PauseRequest { options: PauseOptions { force: true, .. }, .. }))),
        "the process is told so"
    );
}

#[test]
fn the_prefix_cache_is_reset_before_the_kv_cache_is_discarded() {
    const LOADS: &str = "GET /v1/loads?include=core";
    let engines: [(Http, &[&str]); 2] = [
        (
            Http::vllm(&[0], (200, r#"{"success":true}"#)),
            &["GET /metrics", "GET /metrics", "POST /reset_prefix_cache", "GET /metrics", "POST /reset_prefix_cache"],
        ),
        (
            Http::sglang(0, (200, "Cache flushed.")),
            // Its loads are asked for once more in the pause.
            &["GET /metrics", LOADS, LOADS, "POST /flush_cache", LOADS],
        ),
    ];
    for (http, wanted) in &engines {
        let machine = Machine::without_gpus();
        let engine = Fake::new(&machine, "engine", &["kv_cache", "weights"]).with_engine("whatever it says");
        let address = &http.address;
        machine.vramctl(&format!("pause weights --engine {address}")).expect(0, "paused weights", "");
        assert!(!http.asked().iter().any(|request| request.starts_with("POST")), "kept contents need not be forgotten");
        http.asked.lock().unwrap().clear();
        let ran = Ran::of(machine.cli("pause --discard").env("VRAMCTL_ENGINE", address));
        ran.has(0, "paused kv_cache", "");
        assert_eq!(http.asked(), *wanted);
        assert_eq!(engine.asked().len(), 2);
        // Everything is paused: a second pause has nothing to ask about.
        machine.vramctl(&format!("pause --engine {address}")).expect(0, "nothing to do", "");
        assert_eq!(http.asked(), *wanted);
    }
}

/// What the engine has taken of it is not there for the program's work any more.
#[test]
fn a_timeout_is_for_all_that_a_pause_waits_for() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    // It is asked again after 100 ms.
    let busy = Http::vllm(&[0, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --discard --timeout 30.08 --engine {}", busy.address)).expect(0, "paused kv_cache", "");
    // Rounded up to tens of seconds.
    assert!(
        matches!(engine.asked()[..], [Request::Pause(PauseRequest { hold: Some(limit), .. })] if limit.as_secs() <= 30),
        "{:?}",
        engine.asked()
    );
}

/// It has written to the KV cache when the program is held.
#[test]
fn a_request_that_comes_after_the_reset_keeps_its_memory() {
    let late = "a request has come meanwhile";
    for how in ["--discard", "--discard --no-hold", "--no-hold"] {
        let machine = Machine::without_gpus();
        let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
        let busy = Http::vllm(&[0, 0, 1], (200, "{}"));
        machine.vramctl(&format!("pause {how} --engine {}", busy.address)).expect(5, "", late);
    }
    // With a timeout, it is waited for, and the prefix cache is reset again. Nothing is prepared before.
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let soon = Http::vllm(&[0, 0, 1, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --discard --timeout 60 --engine {}", soon.address)).expect(0, "paused kv_cache", "");
    assert_eq!(engine.asked().len(), 1);
    assert_eq!(soon.asked().iter().filter(|request| request.starts_with("POST")).count(), 3);
    // A count that is not up to date: the prefix cache is in use again.
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let resets = AtomicUsize::new(0);
    let stale = Http::new(move |request| match request {
        "GET /metrics" => (200, "vllm:num_requests_running{engine=\"0\"} 0.0\n".into()),
        _ => (200, format!("{{\"success\":{}}}", resets.fetch_add(1, Ordering::Relaxed) == 0)),
    });
    machine.vramctl(&format!("pause --discard --engine {}", stale.address)).expect(5, "", late);
    // It waits for the GPU.
    let asked = AtomicUsize::new(0);
    let stuck = Http::new(move |request| {
        if request.starts_with("GET /v1") && asked.fetch_add(1, Ordering::Relaxed) == 2 {
            thread::sleep(Duration::from_secs(30));
        }
        if request == "GET /metrics" { (404, String::new()) } else { (200, "{\"loads\":[]}".into()) }
    });
    machine.vramctl(&format!("pause --discard --engine {}", stuck.address)).expect(5, "", "it does not answer while it is held");
    machine.vramctl("ps").expect(0, "active", "");
}

#[test]
fn an_engine_with_requests_is_not_paused() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let busy = Http::vllm(&[3], (200, "{}"));
    let loaded = Http::sglang(2, (400, "pending"));
    let would_lose = |requests: u32| format!("it has requests ({requests})");
    for how in ["--no-hold", "--discard"] {
        machine.vramctl(&format!("pause {how} --engine {}", busy.address)).expect(5, "", &would_lose(3));
        machine.vramctl(&format!("pause {how} --engine {} --timeout 0.3", busy.address)).expect(5, "", &would_lose(3));
        machine.vramctl(&format!("pause {how} --engine {}", loaded.address)).expect(5, "", &would_lose(2));
    }
    assert!(engine.asked().is_empty());
    let soon = Http::vllm(&[2, 2, 1, 0], (200, "{}"));
    machine.vramctl(&format!("pause --no-hold --engine {} --timeout 20", soon.address)).expect(0, "paused kv_cache", "");
    machine.vramctl("resume").expect(0, "resumed", "");
    machine.vramctl(&format!("pause --no-hold --force --engine {}", busy.address)).expect(2, "", "'--force' cannot be used with '--engine");
    machine.vramctl("pause --no-hold --force").expect(0, "paused kv_cache", "");
}

/// Requests lose nothing if the engine is held and all contents are kept, so nobody is asked, unless by name.
#[test]
fn an_engine_with_requests_is_held() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let busy = Http::vllm(&[3], (200, "{}"));
    machine.vramctl(&format!("pause --engine {}", busy.address)).expect(5, "", "it has requests (3); stop them");
    machine.vramctl("pause --engine http://127.0.0.1:1").expect(1, "", "does not answer");
    assert!(!busy.asked().is_empty() && engine.asked().is_empty());
    let asked = busy.asked().len();
    Ran::of(machine.cli("pause").env("VRAMCTL_ENGINE", &busy.address)).expect(0, "1.00 GiB kept", "");
    assert_eq!(busy.asked().len(), asked);
    assert!(matches!(engine.asked()[..], [Request::Pause(PauseRequest { hold: Some(TEN_SECONDS), .. })]));
}

/// If the engine cannot reset its cache, nothing is paused, and the message says what to do.
#[test]
fn an_engine_that_cannot_reset_its_prefix_cache_keeps_its_memory() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let pause = |http: &Http| machine.vramctl(&format!("pause --discard --engine {}", http.address));
    pause(&Http::vllm(&[0], (404, ""))).expect(1, "", "VLLM_SERVER_DEV_MODE=1");
    pause(&Http::vllm(&[0], (200, r#"{"success":false}"#))).expect(5, "", "still in use");
    pause(&Http::sglang(0, (400, "Flush cache failed.\nmore"))).expect(5, "", "Flush cache failed.");
    pause(&Http::vllm(&[0], (500, "oh"))).expect(1, "", "answers 500: oh");
    pause(&Http::new(|_| (404, String::new()))).expect(1, "", "/v1/loads");
    machine.vramctl("pause --no-hold --engine http://127.0.0.1:1").expect(1, "", "does not answer");
    machine.vramctl("pause --engine 127.0.0.1:8000").expect(2, "", "http://127.0.0.1:8000");
    assert!(engine.asked().is_empty());
}

#[test]
fn an_engines_api_key_comes_from_the_environment() {
    let machine = Machine::without_gpus();
    let _engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("sglang");
    let http = Http::new(|request| match request.to_lowercase().as_str() {
        "get /v1/loads?include=coreauthorization: bearer secret" => (200, r#"{"loads":[]}"#.into()),
        "post /flush_cacheauthorization: bearer secret" => (200, String::new()),
        "get /metricsauthorization: bearer secret" | "get /metrics" => (404, String::new()),
        _ => (401, String::new()),
    });
    let arguments = ["pause", "--discard", "--engine", &http.address];
    machine.vramctl(&arguments.join(" ")).expect(1, "", "VRAMCTL_ENGINE_KEY");
    let mut command = machine.cli(&arguments);
    Ran::of(command.env("VRAMCTL_ENGINE_KEY", "secret")).expect(0, "discarded", "");
}

/// An engine that reports requests and then nonsense is not idle.
#[test]
fn an_engine_that_starts_to_answer_with_errors_is_not_idle() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]).with_engine("vllm");
    let looks = AtomicUsize::new(0);
    let http = Http::new(move |request| match request {
        "GET /metrics" if looks.fetch_add(1, Ordering::Relaxed) == 0 => (200, "vllm:num_requests_running{engine=\"0\"} 3.0\n".into()),
        "GET /metrics" => (503, "overloaded".into()),
        _ => (404, String::new()),
    });
    let ran = machine.vramctl(&format!("pause --no-hold --engine {}", http.address));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(!engine.asked().iter().any(|request| matches!(request, Request::Pause(_))), "{:?}", engine.asked());
}

/// Each engine has its own prefix cache; one that is not reset would return wrong answers.
#[test]
fn one_engine_url_does_not_cover_two_engines() {
    let machine = Machine::without_gpus();
    let engines = ["a", "b"].map(|name| Fake::new(&machine, name, &["kv_cache"]).with_engine("vllm"));
    let http = Http::vllm(&[0], (200, r#"{"success":true}"#));
    let ran = machine.vramctl(&format!("pause kv_cache --discard --all --engine {}", http.address));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("a, b"), "{ran:?}");
    assert!(http.asked().is_empty());
    assert!(engines.iter().all(|engine| !engine.asked().iter().any(|request| matches!(request, Request::Pause(_)))));
}
