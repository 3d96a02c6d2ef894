//! Files of settings, and `vramctl config`.

use super::*;

fn with_file(text: &str) -> Machine {
    let machine = Machine::without_gpus();
    let folder = machine.folder.path().join("config");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("vramctl.toml"), text).unwrap();
    machine
}

#[test]
fn a_program_gets_what_the_file_and_its_section_say() {
    let machine = with_file("host_keep = 30\nlog = 'info'\n[name.engine]\nlimit = '25%'\nlog = 'error'\n[name.cat]\nmin_bytes = '4M'\n");
    let variables = |line: &[&str], present: &[(&str, &str)]| {
        let ran = run(&machine, line, present).expect(0, "", "");
        let ours = ran.out.lines().filter(|line| ["LIMIT", "LOG=", "KEEP", "MIN_BYTES"].iter().any(|part| line.contains(part)));
        let mut ours: Vec<_> = ours.map(str::to_owned).collect();
        ours.sort();
        ours
    };
    assert_eq!(variables(&["env"], &[]), ["VRAMCTL_HOST_KEEP=30", "VRAMCTL_LOG=info"]);
    assert_eq!(variables(&["--name", "engine", "env"], &[]), ["VRAMCTL_HOST_KEEP=30", "VRAMCTL_LIMIT=25%", "VRAMCTL_LOG=error"]);
    assert_eq!(variables(&["env"], &[("VRAMCTL_NAME", "engine")]).len(), 3, "a name is a name");
    let present = [("VRAMCTL_LIMIT", "10G"), ("VRAMCTL_HOST_KEEP", "5")];
    assert_eq!(
        variables(&["--name", "engine", "--log", "off", "env"], &present),
        ["VRAMCTL_HOST_KEEP=5", "VRAMCTL_LIMIT=10G", "VRAMCTL_LOG=off"],
        "options come first, then the environment"
    );
}

#[test]
fn what_holds_is_shown_with_where_it_comes_from() {
    let machine = with_file("host_keep = 30\n[name.engine]\nlimit = '25%'\n");
    let mut shown = machine.cli("config engine");
    let file = machine.folder.path().join("config/vramctl.toml");
    let ran = Ran::of(shown.env("VRAMCTL_ENGINE_KEY", "secret")).expect(0, "", "");
    for part in
        ["host_keep", &format!("{}:1", file.display()), &format!("{}:3 [name.engine]", file.display()), "environment", "/etc/vramctl.toml"]
    {
        assert!(ran.out.contains(part), "{part} is not in {}", ran.out);
    }
    assert!(!ran.out.contains("secret"), "{}", ran.out);
    let json = machine.vramctl("config --json").expect(0, "", "").json();
    let keep = json["settings"].as_array().unwrap().iter().find(|one| one["key"] == "host_keep").unwrap();
    assert_eq!((&keep["variable"], &keep["value"]), (&json!("VRAMCTL_HOST_KEEP"), &json!("30")));
    machine.vramctl("config --all").expect(0, "report_dir", "");
    Ran::of(machine.cli("config").env("VRAMCTL_CONFIG", "")).expect(0, "No file is read", "");
}

/// Whoever is paused comes back in spite of a typing error.
#[test]
fn a_mistake_stops_what_starts_and_nothing_else() {
    let machine = with_file("host_kep = 30\n");
    let mistake = "config/vramctl.toml:1: there is no setting host_kep; did you mean host_keep?";
    run(&machine, &["true"], &[]).expect(2, "", mistake);
    machine.vramctl("config").expect(2, "", mistake);
    machine.vramctl("ps").expect(0, "", &format!("{mistake}; this line is left out"));
    let engine = Fake::new(&machine, "engine", &["weights"]);
    machine.vramctl("pause").expect(0, "", mistake);
    machine.vramctl("resume").expect(0, "", mistake);
    assert_eq!(engine.asked().len(), 2);
}
