//! `vramctl operate`: operations of programs.

use super::*;

#[test]
fn a_program_hears_what_comes_of_its_operation() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights", "kv_cache"]);
    let pause = request("pause", &json!({ "target": { "name": "engine" }, "tags": ["kv_cache"], "backup": "discard", "progress": true }));
    let (lines, code) = Operating::new(&machine, &pause).ends();
    assert_eq!(code, Some(0));
    assert_eq!(lines[0], json!({ "reply": "progress", "pid": engine.pid(), "stage": "save", "done": 1, "total": 2 }));
    let outcome = &lines[lines.len() - 1];
    assert_eq!((&outcome["committed"], &outcome["error"]), (&json!(true), &Value::Null), "{outcome}");
    let of_process = &outcome["processes"][0];
    assert_eq!(
        (&of_process["pid"], &of_process["tags"], &of_process["report"]["discarded_bytes"]),
        (&json!(engine.pid()), &json!(["kv_cache"]), &json!(GIB))
    );
    assert_eq!((&outcome["jobs"][0]["pids"], &outcome["jobs"][0]["attempts"]), (&json!([engine.pid()]), &json!(1)));
    let status = operate(&machine, &request("status", &json!({ "target": { "pid": engine.pid() } })));
    let of_tags: Vec<_> = status["processes"][0]["tags"].as_array().unwrap().iter().map(|tag| tag["state"].clone()).collect();
    assert_eq!(of_tags, ["active", "paused"]);
    assert_eq!(operate(&machine, &request("resume", &json!({})))["processes"][0]["report"]["bytes"], json!(GIB));
}

#[test]
fn a_program_hears_why_its_operation_failed() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["weights"]);
    let failed = |request: &Value| {
        let outcome = operate(&machine, request);
        assert_eq!(outcome["committed"], false, "{outcome}");
        outcome["error"].clone()
    };
    let pause = |fields: Value| failed(&request("pause", &fields));
    assert_eq!(pause(json!({ "target": { "name": "nobody" } }))["code"], "no_process");
    // A word of a person may name the process. A program says which is which.
    let unknown = pause(json!({ "tags": ["engine"] }));
    assert_eq!((&unknown["code"], &unknown["known_tags"]), (&json!("unknown_tag"), &json!(["weights"])));
    let held = pause(json!({ "target": "all", "waiting": engine.pid() }));
    assert!(held["code"] == "invalid" && held["message"].as_str().unwrap().contains("a program cannot hold itself"), "{held}");
    for (fields, why) in [
        (json!({ "sharde": true }), "unknown field `sharde`"),
        (json!({ "backup": "tape" }), "unknown variant `tape`"),
        (json!({ "hold": false, "shared": true }), "need `hold`"),
        (json!({ "engines": ["ftp://engine"] }), "not an address"),
    ] {
        let wrong = pause(fields);
        assert!(wrong["code"] == "invalid" && wrong["message"].as_str().unwrap().contains(why), "{wrong}");
    }
    assert_eq!(failed(&request("suspend", &json!({ "registered": "keep" })))["code"], "invalid");
    assert_eq!(failed(&request("explode", &json!({})))["code"], "invalid");
    let newer = failed(&json!({ "version": 2, "operation": "pause" }));
    assert!(newer["message"].as_str().unwrap().contains("version 2"), "{newer}");
    let other = Fake::new(&machine, "other", &["weights"]);
    let several = pause(json!({}));
    let mut pids = [engine.pid(), other.pid()];
    pids.sort_unstable();
    assert_eq!((&several["code"], &several["pids"]), (&json!("several_processes"), &json!(pids)));
    assert!(engine.asked().is_empty() && other.asked().is_empty());
    // Held by nobody, it waits for the answer only.
    for fields in [json!({ "target": { "name": "other" } }), json!({ "target": { "name": "engine" }, "hold": false })] {
        let mut fields = fields;
        fields["waiting"] = json!(engine.pid());
        assert_eq!(operate(&machine, &request("pause", &fields))["committed"], true);
    }
}

/// However the program says that it does not want it any more.
#[test]
fn a_program_can_cancel_its_operation() {
    for by_a_line in [false, true] {
        let machine = Machine::without_gpus();
        let engine =
            Fake::reacting(&machine, "engine", &["weights"], |request| matches!(request, Request::Pause(_)).then_some(Reaction::BeSilent));
        let mut operating = Operating::new(&machine, &request("pause", &json!({})));
        while engine.state.lock().unwrap().transitions == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        let mut stdin = operating.child.stdin.take().unwrap();
        if by_a_line {
            writeln!(stdin).unwrap();
        } else {
            drop(stdin);
        }
        let (lines, code) = operating.ends();
        let outcome = &lines[lines.len() - 1];
        assert_eq!((code, &outcome["committed"], &outcome["error"]["code"]), (Some(1), &json!(false), &json!("cancelled")), "{outcome}");
        assert_eq!(outcome["processes"], json!([{ "pid": engine.pid(), "name": "engine", "left": "as_it_was" }]));
    }
}

/// The example in the page is one that the command understands.
#[test]
fn the_documented_operation_runs() {
    let machine = Machine::without_gpus();
    let engine = Fake::new(&machine, "engine", &["kv_cache"]);
    let page = protocol_page();
    let mut documented = blocks(&page, "jsonl")[0].lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let (lines, _) = Operating::new(&machine, &documented.next().unwrap()).ends();
    for wanted in documented {
        let told = lines.iter().find(|line| line["reply"] == wanted["reply"]).unwrap_or_else(|| panic!("{wanted} in {lines:?}"));
        let names = |line: &Value| line.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(told), names(&wanted));
    }
    assert_eq!(engine.asked().len(), 1);
}
