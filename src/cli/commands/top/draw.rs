//! Draws the display: at least 80 columns, plain ASCII, and no information in colour alone.

use super::keys::{self, KEYS};
use super::model::{Curves, GpuBar, Model, Overlay, Rate, Slice, TableRow, View};
use ratatui::buffer::Buffer;
use ratatui::layout::{Margin, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::border;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Widget, Wrap};
use std::fmt::Write;
use std::time::Instant;
use vramctl_coordinator::text;
use vramctl_model::{Bytes, Progress, Verb};

/// With at least this width, the table has more columns.
const WIDE: u16 = 100;
/// The most lines of a message.
const MESSAGE_LINES: usize = 5;
const COLOURS: [Color; 6] = [Color::Green, Color::Blue, Color::Magenta, Color::Yellow, Color::Cyan, Color::Red];
const ASCII: border::Set<'_> = border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};

/// How many lines it takes to show everything at this width.
pub fn height(model: &Model, width: u16, now: Instant) -> u16 {
    let top = above(model, width, now, usize::MAX).len();
    u16::try_from(top + (1 + model.rows(now).len()).max(TABLE)).unwrap_or(u16::MAX)
}

/// How many lines the table has at least, with its header.
const TABLE: usize = 4;

/// Draws all of it. Without `is_live`, no keys.
pub fn draw(buffer: &mut Buffer, model: &Model, now: Instant, is_live: bool) {
    let area = buffer.area;
    let message = if is_live { message(model, now, usize::from(area.width)) } else { Vec::new() };
    let below = if is_live { (1 + message.len()).min(usize::from(area.height)) } else { 0 };
    // On a small screen, the table takes precedence.
    let most = usize::from(area.height).saturating_sub(below + TABLE);
    let above = above(model, area.width, now, most);
    let mut y = area.y;
    for line in &above {
        put(buffer, area, &mut y, line);
    }
    table(buffer, Rect { y, height: (area.bottom() - below as u16).saturating_sub(y), ..area }, model, now, is_live);
    if is_live {
        let mut y = area.bottom() - below as u16;
        for line in &message {
            put(buffer, area, &mut y, line);
        }
        put(buffer, area, &mut y, &footer(model));
        overlay(buffer, area, &model.overlay);
    }
}

fn put(buffer: &mut Buffer, area: Rect, y: &mut u16, line: &Line<'_>) {
    if *y < area.bottom() {
        buffer.set_line(area.x, *y, line, area.width);
        *y += 1;
    }
}

/// The part above the table, in at most this many lines.
fn above<'a>(model: &Model, width: u16, now: Instant, most: usize) -> Vec<Line<'a>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let count = text::count(model.processes(), "process", "processes");
    let filter = if model.filter.is_empty() { String::new() } else { format!(", only those with \"{}\"", text::plain(&model.filter)) };
    let title = format!("vramctl top: {count}, every {} s{filter}", model.interval.as_secs_f64());
    let mut lines = vec![Line::styled(title, bold)];
    // Room for the part below the bars, and the header.
    let room = most.saturating_sub(4).max(1);
    let bars = model.bars();
    let shown = if bars.len() > room { room.saturating_sub(1).max(1) } else { bars.len() };
    let below: Vec<_> = bars.iter().map(|one| below_bar(one, model, width, now)).collect();
    let link = model.curves.map(|curves| link(curves, model, width, now));
    let has_room_below = bars.len() + below.iter().chain([&link]).flatten().count() <= room;
    for (one, below) in bars[..shown].iter().zip(below) {
        lines.push(bar(one, width));
        lines.extend(below.filter(|_| has_room_below));
    }
    if shown < bars.len() {
        let gpus = text::count(bars.len() - shown, "more GPU", "more GPUs");
        lines.push(Line::raw(format!("and {gpus}: there is no room to show them")));
    }
    match (bars.is_empty(), model.gpus_silent(now)) {
        (true, _) => lines.extend(wrapped(&text::plain(&model.no_bars()), usize::from(width)).into_iter().map(Line::raw)),
        (false, Some(age)) => lines.push(Line::raw(format!("NVML has not answered for {} s: the bars are from then", age.as_secs()))),
        (false, None) => lines.push(legend()),
    }
    lines.push(host(model));
    lines.push(Line::raw(format!("Link   out {}, in {}", rate(model.rate(Verb::Pause)), rate(model.rate(Verb::Resume)))));
    lines.extend(link.filter(|_| has_room_below));
    let wide = usize::from(width).saturating_sub(7);
    let sharing = model.sharing().into_iter().flat_map(|news| wrapped(&text::plain(&news), wide));
    lines.extend(sharing.enumerate().map(|(number, line)| Line::raw(format!("{:7}{line}", if number == 0 { "Share" } else { "" }))));
    lines.push(Line::default());
    lines.truncate(most.max(1));
    lines
}

fn legend<'a>() -> Line<'a> {
    let parts = [Slice::Unmanaged, Slice::Driver, Slice::Others, Slice::Unexplained, Slice::Free];
    let names = ["left to CUDA", "driver", "others", "unexplained", "free"];
    let mut spans = vec![Span::raw("       a-z tags")];
    for (part, name) in parts.into_iter().zip(names) {
        spans.extend([Span::raw("  "), Span::styled(symbol(part).to_string(), style(part)), Span::raw(format!(" {name}"))]);
    }
    Line::from(spans)
}

fn symbol(part: Slice) -> char {
    match part {
        Slice::Letter(letter) => letter,
        Slice::Unmanaged => '-',
        Slice::Driver => '=',
        Slice::Others => '#',
        Slice::Unexplained => '?',
        Slice::Free => '.',
    }
}

fn style(part: Slice) -> Style {
    match part {
        Slice::Letter(letter) => Style::new().fg(COLOURS[letter as usize % COLOURS.len()]).add_modifier(Modifier::BOLD),
        Slice::Free => Style::new().add_modifier(Modifier::DIM),
        _ => Style::new(),
    }
}

/// What is in front of a bar, and after it; and the width of the bar.
fn around_bar(bar: &GpuBar, width: u16) -> (String, String, usize) {
    let amount = format!("{} of {}", Bytes(bar.used), Bytes(bar.total));
    let percent = bar.utilization.map_or_else(|| "-".into(), |percent| format!("{percent}%"));
    let name = format!("GPU {:<2} {percent:>4} ", bar.index);
    let model = if width >= WIDE && !bar.model.is_empty() { format!("  {}", fit(&bar.model, 24)) } else { String::new() };
    let cells = usize::from(width).saturating_sub(name.len() + 2 + 2 + 24 + model.len());
    (name, format!("  {amount:>24}{model}"), cells)
}

/// In front of a curve, as wide as what is in front of a bar.
const LATELY: &str = "  last 5 min";

/// How much of the GPU's memory was in use lately, and how warm it is; `None` if neither is to be shown.
fn below_bar<'a>(bar: &GpuBar, model: &Model, width: u16, now: Instant) -> Option<Line<'a>> {
    let (_, _, cells) = around_bar(bar, width);
    let celsius = bar.climate.celsius.map(|celsius| format!("{celsius} C"));
    let watts = bar.climate.milliwatts.map(|milliwatts| format!("{} W", milliwatts / 1000));
    let climate = [celsius, watts].into_iter().flatten().collect::<Vec<_>>().join(", ");
    let (title, past) = match model.curves {
        Some(curves) => (LATELY, curve(curves, model.past_of_gpu(bar.index, cells, now))),
        None => ("", " ".repeat(cells)),
    };
    let is_empty = model.curves.is_none() && climate.is_empty();
    (!is_empty).then(|| Line::raw(format!("{title:12} {past}   {climate:>24}")))
}

/// What has gone over the link lately, each direction as a share of its highest rate.
fn link<'a>(curves: Curves, model: &Model, width: u16, now: Instant) -> Line<'a> {
    let cells = usize::from(width).saturating_sub(LATELY.len() + " out   in ".len()) / 2;
    let past = |verb| curve(curves, model.past_of_link(verb, cells, now));
    Line::raw(format!("{LATELY} out {}  in {}", past(Verb::Pause), past(Verb::Resume)))
}

fn curve(curves: Curves, shares: Vec<Option<f64>>) -> String {
    shares.into_iter().map(|share| curves.character(share)).collect()
}

fn bar<'a>(bar: &GpuBar, width: u16) -> Line<'a> {
    let (name, amount, cells) = around_bar(bar, width);
    let mut spans = vec![Span::raw(format!("{name}["))];
    for (part, cells) in shares(&bar.parts, cells) {
        spans.push(Span::styled(symbol(part).to_string().repeat(cells), style(part)));
    }
    spans.push(Span::raw(format!("]{amount}")));
    Line::from(spans)
}

/// Divides cells in proportion to bytes. Remaining cells go to the largest remainders, so that they add up.
fn shares(parts: &[(Slice, u64)], cells: usize) -> Vec<(Slice, usize)> {
    let total: u128 = parts.iter().map(|(_, bytes)| u128::from(*bytes)).sum::<u128>().max(1);
    let scaled = |bytes: u64| u128::from(bytes) * cells as u128;
    let mut shares: Vec<_> = parts.iter().map(|(part, bytes)| (*part, (scaled(*bytes) / total) as usize)).collect();
    let mut places: Vec<_> = (0..parts.len()).filter(|place| parts[*place].1 > 0).collect();
    places.sort_by_key(|place| std::cmp::Reverse(scaled(parts[*place].1) % total));
    let left = cells.saturating_sub(shares.iter().map(|(_, cells)| cells).sum());
    for place in places.into_iter().take(left) {
        shares[place].1 += 1;
    }
    shares
}

fn host<'a>(model: &Model) -> Line<'a> {
    let host = model.host();
    let limit = host.limit.map_or_else(String::new, |limit| format!(" of {}", Bytes(limit)));
    let (backups, ready, other, free) = (Bytes(host.backups), Bytes(host.ready), Bytes(host.other), Bytes(host.free));
    Line::raw(format!("Host   {backups} backups, {ready} ready, {other} other; {free} free{limit}"))
}

fn rate(rate: Rate) -> String {
    match rate {
        None => "none yet".into(),
        Some((bytes, is_now)) => format!("{}/s {}", Bytes(bytes as u64), if is_now { "now" } else { "last" }),
    }
}

/// Places of the columns: the title, the state, and numbers.
struct Columns {
    title: usize,
    state: usize,
    /// Also contents on disk.
    disk: bool,
}

const NUMBER: usize = 12;

impl Columns {
    fn of(width: u16) -> Self {
        let disk = width >= WIDE;
        let rest = usize::from(width).saturating_sub(5 + NUMBER * (3 + usize::from(disk)));
        let state = (rest / 2).clamp(10, 32);
        Self { title: rest.saturating_sub(state + 1), state, disk }
    }

    fn line(&self, mark: &str, letter: Span<'static>, title: &str, state: &str, numbers: [&str; 4]) -> Line<'static> {
        let (title, state) = (fit(title, self.title), fit(state, self.state));
        let mut text =
            format!(" {}{} {}{} ", title, " ".repeat(self.title - width_of(&title)), state, " ".repeat(self.state - width_of(&state)));
        for number in &numbers[..if self.disk { 4 } else { 3 }] {
            let _ = write!(text, "{number:>NUMBER$}");
        }
        Line::from(vec![Span::raw(mark.to_owned()), letter, Span::raw(text)])
    }
}

fn table(buffer: &mut Buffer, area: Rect, model: &Model, now: Instant, is_live: bool) {
    let columns = Columns::of(area.width);
    let header = columns.line("  ", Span::raw(" "), "NAME, TAG", "STATE", ["ACTIVE", "PAUSED", "IN HOST", "ON DISK"]);
    let mut y = area.y;
    put(buffer, area, &mut y, &header.style(Style::new().add_modifier(Modifier::BOLD)));
    let rows = model.rows(now);
    if rows.is_empty() {
        let none_passes = (!model.filter.is_empty()).then(|| format!("nothing contains \"{}\": esc shows all", model.filter));
        let text = model.trouble.clone().or(none_passes).unwrap_or_else(|| nobody(model.found));
        Paragraph::new(text::plain(&text))
            .wrap(Wrap { trim: true })
            .render(Rect { y, height: area.bottom().saturating_sub(y), ..area }, buffer);
        return;
    }
    let selected = model.selection(&rows).filter(|_| is_live);
    let room = usize::from(area.bottom().saturating_sub(y));
    // Keep the selected row in the middle, if there are more rows below and above.
    let first = selected.unwrap_or(0).saturating_sub(room / 2).min(rows.len().saturating_sub(room));
    for (at, row) in rows.iter().enumerate().skip(first).take(room) {
        let is_selected = selected == Some(at);
        let line = row_line(&columns, row, is_selected);
        let style = if is_selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        put(buffer, area, &mut y, &line.style(style));
    }
}

/// Why there are no rows, if that many processes were found.
fn nobody(found: Option<usize>) -> String {
    match found {
        None => "looking for managed processes".into(),
        Some(0) => "no process is managed: start one with `vramctl run -- COMMAND`; it appears once it has allocated GPU memory".into(),
        // A stopped one takes some seconds to be known as that.
        Some(several) => format!("asking {}: no answer yet", text::count(several, "process", "processes")),
    }
}

fn row_line(columns: &Columns, row: &TableRow, is_selected: bool) -> Line<'static> {
    let title = if row.is_child() { format!("  {}", row.title) } else { row.title.clone() };
    let title = fit_name(&title, columns.title);
    let state = row.progress.map_or_else(|| row.state.clone(), |progress| progress_text(progress, columns.state));
    let numbers = [row.active, row.paused, row.host, row.disk].map(|bytes| if bytes == 0 { "-".into() } else { Bytes(bytes).to_string() });
    let letter = match row.letter {
        Some(letter) => Span::styled(letter.to_string(), style(Slice::Letter(letter))),
        None => Span::raw(" "),
    };
    columns.line(if is_selected { "> " } else { "  " }, letter, &title, &state, numbers.each_ref().map(String::as_str))
}

/// `save [####----]  45%`, in this width.
fn progress_text(Progress { stage, done, total }: Progress, width: usize) -> String {
    let share = if total == 0 { 0.0 } else { (done as f64 / total as f64).min(1.0) };
    let cells = width.saturating_sub(stage.name().len() + 8);
    let full = (share * cells as f64) as usize;
    format!("{} [{}{}] {:3.0}%", stage.name(), "#".repeat(full), "-".repeat(cells - full), (share * 100.0).floor())
}

/// The output of the last command, or the running command.
fn message<'a>(model: &Model, now: Instant, width: usize) -> Vec<Line<'a>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    if let Some((words, since)) = &model.command {
        let seconds = now.saturating_duration_since(*since).as_secs();
        return vec![Line::styled(fit(&format!("$ vramctl {}   {seconds} s, x cancels", words.join(" ")), width), bold)];
    }
    let Some(text) = model.message(now) else { return Vec::new() };
    let text = text::plain(text);
    let mut lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).flat_map(|line| wrapped(line, width)).collect();
    if lines.len() > MESSAGE_LINES {
        // Keep the end: a job's last lines report its result, and errors come last.
        lines.drain(..=lines.len() - MESSAGE_LINES);
        lines.insert(0, "...".into());
    }
    lines.into_iter().map(|line| Line::styled(line, bold)).collect()
}

fn footer<'a>(model: &Model) -> Line<'a> {
    let filter = text::plain(&model.filter);
    if model.overlay == Overlay::Filter {
        return Line::styled(format!(" filter: {filter}_   enter: keep it   esc: show all"), Style::new().add_modifier(Modifier::REVERSED));
    }
    if let Overlay::Asking { needs, of, typed } = &model.overlay {
        let (question, typed) = (keys::question(model, *needs, of), text::plain(typed));
        let asked = format!(" {}: {typed}_   enter: go on   esc: leave it", text::plain(&question));
        return Line::styled(asked, Style::new().add_modifier(Modifier::REVERSED));
    }
    let view = if model.view == View::Tags { "pids" } else { "tags" };
    let keys = format!(" p pause  r resume  s suspend  o order: {:5}  t {view}  / filter  ? help  q quit", model.order.name());
    Line::styled(keys, Style::new().add_modifier(Modifier::REVERSED))
}

fn overlay(buffer: &mut Buffer, area: Rect, overlay: &Overlay) {
    let (title, lines) = match overlay {
        Overlay::Nothing | Overlay::Filter | Overlay::Asking { .. } => return,
        Overlay::Help => {
            let keys = KEYS.iter().map(|(key, what)| format!("{key:<16}  {what}"));
            let bars = [
                "",
                "Before each bar: the share of time in which the GPU executes kernels. Each cell of",
                "a bar is a share of its memory; letters are the tags in the table. vramctl gpus has",
                "the numbers, docs/monitoring.md the rest. Curves: of the GPU's memory; of the highest rate.",
            ];
            (" Keys ", keys.chain(bars.map(str::to_owned)).collect::<Vec<_>>())
        }
        Overlay::Question { words, what, lost } => {
            let command = format!("$ vramctl {}", words.join(" "));
            let mut lines = vec![what.clone(), String::new(), command, String::new(), "y or enter: do it    any other key: do not".into()];
            if !lost.is_empty() {
                lines.insert(1, lost.clone());
            }
            (" Really? ", lines)
        }
    };
    let most = usize::from(area.width).saturating_sub(4).max(1);
    let lines: Vec<_> = lines.iter().flat_map(|line| wrapped(&text::plain(line), most)).collect();
    let width = lines.iter().map(|line| width_of(line)).max().unwrap_or(0).max(title.len()) + 4;
    let (width, height) = ((width as u16).min(area.width), (lines.len() as u16 + 2).min(area.height));
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buffer);
    Block::bordered().border_set(ASCII).title(title).render(place, buffer);
    let inside = place.inner(Margin { horizontal: 2, vertical: 1 });
    Paragraph::new(lines.into_iter().map(Line::raw).collect::<Vec<_>>()).render(inside, buffer);
}

fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// Cuts the name in front of a pid, which commands need whole, to this width in all.
fn fit_name(title: &str, width: usize) -> String {
    match title.rfind(" (pid ").map(|at| title.split_at(at)) {
        Some((name, pid)) if width_of(title) > width && pid.len() + 3 < width => format!("{}{pid}", fit(name, width - pid.len())),
        _ => title.to_owned(),
    }
}

/// Cuts a text to this width.
fn fit(text: &str, width: usize) -> String {
    let text = text::plain(text).replace('\n', "\u{fffd}");
    if width_of(&text) <= width {
        return text;
    }
    let mut cut = String::new();
    for c in text.chars() {
        if width_of(&cut) + width_of(c.encode_utf8(&mut [0; 4])) + 2 > width {
            break;
        }
        cut.push(c);
    }
    cut + &"..".chars().take(width).collect::<String>()
}

/// Wraps a line, between words where possible.
fn wrapped(line: &str, width: usize) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), line);
    while width_of(rest) > width.max(1) {
        let mut end = 0;
        for (at, c) in rest.char_indices() {
            if width_of(&rest[..at + c.len_utf8()]) > width.max(1) {
                break;
            }
            end = at + c.len_utf8();
        }
        // Never nothing.
        let end = end.max(rest.chars().next().map_or(0, char::len_utf8));
        let fits = rest[end..].starts_with(' ');
        let at = rest[..end].rfind(' ').filter(|at| *at > 0 && !fits).unwrap_or(end);
        lines.push(rest[..at].to_owned());
        rest = rest[at..].trim_start();
    }
    if !rest.is_empty() || lines.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

/// The frame as text; `with_codes` adds the terminal codes for colours and bold.
pub fn text(buffer: &Buffer, with_codes: bool) -> String {
    let mut text = String::new();
    for y in 0..buffer.area.height {
        let mut line = String::new();
        let mut before = String::new();
        let mut x = 0;
        while x < buffer.area.width {
            let cell = &buffer[(x, y)];
            // A wide character has the next cell, too.
            x += width_of(cell.symbol()).max(1) as u16;
            let now = if with_codes { codes(cell.fg, cell.modifier) } else { String::new() };
            if now != before {
                let _ = write!(line, "\x1b[0{now}m");
                before = now;
            }
            line += cell.symbol();
        }
        if !before.is_empty() {
            line += "\x1b[0m";
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn codes(colour: Color, modifier: Modifier) -> String {
    let colour = match colour {
        Color::Red => ";31",
        Color::Green => ";32",
        Color::Yellow => ";33",
        Color::Blue => ";34",
        Color::Magenta => ";35",
        Color::Cyan => ";36",
        _ => "",
    };
    let modifiers = [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")];
    modifiers.into_iter().filter(|(one, _)| modifier.contains(*one)).map(|(_, code)| code).chain([colour]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::model::{Gpus, Sample};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::collections::BTreeMap;
    use std::time::Duration;
    use vramctl_coordinator::failure::{CommandError, Exit};
    use vramctl_coordinator::process::{Process, made_up::process};
    use vramctl_driver::{Card, Climate, NoCards};
    use vramctl_host::limits::Room;
    use vramctl_model::{DeviceStatus, Holder, Stage, TagState, Totals, Unmanaged};

    #[test]
    fn a_pid_is_shown_whole() {
        assert_eq!(fit_name("tuner (pid 4194304)", 19), "tuner (pid 4194304)");
        assert_eq!(fit_name("trainer (pid 4194304)", 19), "tra.. (pid 4194304)");
        assert_eq!(fit_name("a name that is long", 10), "a name that is long", "for fit() to cut");
        assert_eq!(fit_name("trainer (pid 4194304)", 9), "trainer (pid 4194304)");
    }

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn sample(process: Process) -> Sample {
        Sample { process, resident: 3 * GIB, room: None }
    }

    /// With its tags on a GPU of 10 GiB.
    fn on_gpu(mut process: Process) -> Process {
        let memory = &mut process.status.as_mut().unwrap().memory;
        let tags = memory.tags.iter().filter(|tag| tag.paused_bytes == 0).map(|tag| (tag.tag.clone(), tag.bytes)).collect();
        memory.devices = vec![DeviceStatus { uuid: Some("GPU-0".into()), tags, ..DeviceStatus::default() }];
        process
    }

    fn card(index: u32) -> (Card, Vec<Holder>) {
        let holder = |pid, bytes| Holder { pid, bytes: Some(bytes), program: Some("program".into()) };
        let (uuid, name) = (format!("GPU-{index}"), "NVIDIA H200".into());
        let used = 9 * GIB / 2;
        let card = Card { index, uuid, name, used, free: 10 * GIB - used, total: 10 * GIB, utilization: Some(37), ..Card::default() };
        (card, vec![holder(7, 5 * GIB / 2), holder(99, GIB)])
    }

    /// An engine with two tags of 1 GiB and 0.25 GiB of NCCL's, another program with 1 GiB, and 1 GiB unexplained.
    fn busy(now: Instant) -> Model {
        let mut model = Model::new(Duration::from_secs(1));
        let mut engine = on_gpu(process(7, "engine", &[("kv_cache", TagState::Active), ("weights", TagState::Active)]));
        let gpus = [("GPU-0".to_owned(), GIB / 4)].into();
        engine.status.as_mut().unwrap().memory.unmanaged = vec![Unmanaged { owner: "libnccl.so.2".into(), bytes: GIB / 4, gpus }];
        model.put(sample(engine), now);
        let mut trainer = process(8, "trainer", &[("weights", TagState::Paused)]);
        let memory = &mut trainer.status.as_mut().unwrap().memory;
        (memory.held, memory.tags[0].host_bytes, memory.host.ready_bytes) = (true, GIB, 2 * GIB);
        model.put(sample(trainer), now);
        model.put_gpus(Gpus { cards: Ok(vec![card(0)]), climates: BTreeMap::new(), available: 60 * GIB }, now);
        model
    }

    fn picture(model: &Model, now: Instant, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame.buffer_mut(), model, now, true)).unwrap();
        let lines: Vec<_> = text(terminal.backend().buffer(), false).lines().map(str::to_owned).collect();
        lines.join("\n")
    }

    #[track_caller]
    fn assert_picture(model: &Model, now: Instant, width: u16, height: u16, wanted: &str) {
        let (drawn, wanted) = (picture(model, now, width, height), wanted.trim_start_matches('\n').trim_end());
        assert_eq!(drawn.trim_end(), wanted, "drawn:\n{drawn}\n");
    }

    #[test]
    fn eighty_columns_show_all_that_matters() {
        let now = Instant::now();
        assert_picture(
            &busy(now),
            now,
            80,
            16,
            r"
vramctl top: 2 processes, every 1 s
GPU 0   37% [aaaabbbb-=####????......................]     4.50 GiB of 10.00 GiB
       a-z tags  - left to CUDA  = driver  # others  ? unexplained  . free
Host   1.00 GiB backups, 1.00 GiB ready, 4.00 GiB other; 60.00 GiB free
Link   out none yet, in none yet

    NAME, TAG           STATE                     ACTIVE      PAUSED     IN HOST
>   engine (pid 7)      active                  2.00 GiB           -           -
  a   kv_cache          active                  1.00 GiB           -           -
  b   weights           active                  1.00 GiB           -           -
    trainer (pid 8)     held, paused                   -    1.00 GiB    1.00 GiB
  c   weights           paused                         -    1.00 GiB    1.00 GiB



 p pause  r resume  s suspend  o order: name   t pids  / filter  ? help  q quit
",
        );
    }

    #[test]
    fn wider_terminals_show_more() {
        let now = Instant::now();
        assert_picture(
            &busy(now),
            now,
            120,
            14,
            r"
vramctl top: 2 processes, every 1 s
GPU 0   37% [aaaaaaabbbbbbb-=#######???????.....................................]     4.50 GiB of 10.00 GiB  NVIDIA H200
       a-z tags  - left to CUDA  = driver  # others  ? unexplained  . free
Host   1.00 GiB backups, 1.00 GiB ready, 4.00 GiB other; 60.00 GiB free
Link   out none yet, in none yet

    NAME, TAG                          STATE                                  ACTIVE      PAUSED     IN HOST     ON DISK
>   engine (pid 7)                     active                               2.00 GiB           -           -           -
  a   kv_cache                         active                               1.00 GiB           -           -           -
  b   weights                          active                               1.00 GiB           -           -           -
    trainer (pid 8)                    held, paused                                -    1.00 GiB    1.00 GiB           -
  c   weights                          paused                                      -    1.00 GiB    1.00 GiB           -

 p pause  r resume  s suspend  o order: name   t pids  / filter  ? help  q quit
",
        );
    }

    /// The last five minutes, in 40 parts of 7.5 s: nothing is known of the first ones.
    #[test]
    fn curves_show_the_last_minutes_and_beside_them_how_warm_it_is() {
        let then = Instant::now();
        let at = |seconds| then + Duration::from_secs(seconds);
        let mut model = busy(then);
        let shared = |used| {
            let (card, holders) = card(0);
            let climate = Climate { celsius: Some(54), milliwatts: Some(312_900) };
            let cards = Ok(vec![(Card { used: used * GIB / 10, ..card }, holders)]);
            Gpus { cards, climates: [("GPU-0".into(), climate)].into(), available: 60 * GIB }
        };
        for (seconds, used) in [(75, 0), (150, 50), (151, 90), (225, 100), (300, 20)] {
            model.put_gpus(shared(used), at(seconds));
        }
        let paused = |ms| {
            let mut trainer = process(8, "trainer", &[("weights", TagState::Paused)]);
            let stages = [(Stage::Save, ms)].into();
            trainer.status.as_mut().unwrap().memory.totals =
                [(Verb::Pause, Totals { done: 1, bytes: GIB, kept_bytes: GIB, stages, ..Totals::default() })].into();
            sample(trainer)
        };
        model.put(paused(1000.0), at(300));
        let lines = |model: &Model| picture(model, at(300), 80, 20).lines().map(str::to_owned).collect::<Vec<_>>();
        let below = |lines: &[String], what: &str| lines[lines.iter().position(|line| line.starts_with(what)).unwrap() + 1].clone();
        assert!(lines(&model).iter().all(|line| !line.contains("last 5 min")), "only where they are wanted");
        assert_eq!(below(&lines(&model), "GPU 0 ").trim(), "54 C, 312 W");
        model.curves = Some(Curves::Ascii);
        let drawn = lines(&model);
        assert_eq!(below(&drawn, "GPU 0 "), "  last 5 min ----------__________**********#########.                54 C, 312 W");
        assert_eq!(below(&drawn, "Link "), "  last 5 min out ____________________________#  in _____________________________");
        model.curves = Some(Curves::Blocks);
        assert!(below(&lines(&model), "GPU 0 ").contains("▁▁▁▁▁▁▁▁▁▁▇▇▇▇▇▇▇▇▇▇█████████"), "{}", lines(&model).join("\n"));
        let shown = |height| picture(&model, at(300), 80, height).contains("last 5 min");
        assert_eq!((shown(14), shown(10)), (true, false), "the table and the bars come first");
    }

    #[test]
    fn curves_are_drawn_in_what_the_terminal_has() {
        let of = |variables: &[(&str, &str)]| {
            let variables: BTreeMap<_, _> = variables.iter().copied().collect();
            Curves::of_terminal(|name| variables.get(name).map(|value| (*value).to_owned()))
        };
        assert_eq!(of(&[("TERM", "xterm"), ("LANG", "C.UTF-8")]), Curves::Blocks);
        assert_eq!(of(&[("TERM", "xterm"), ("LC_ALL", ""), ("LC_CTYPE", "de_DE.utf8"), ("LANG", "C")]), Curves::Blocks);
        for plain in [
            [("TERM", "xterm"), ("LANG", "C")],
            [("TERM", "linux"), ("LANG", "C.UTF-8")],
            [("TERM", ""), ("LANG", "C.UTF-8")],
            [("LC_ALL", "C"), ("LANG", "C.UTF-8")],
        ] {
            assert_eq!(of(&plain), Curves::Ascii, "{plain:?}");
        }
    }

    #[test]
    fn what_is_being_copied_has_a_bar_and_a_speed() {
        let then = Instant::now();
        let mut model = busy(then);
        let pausing = |done| {
            let mut engine = on_gpu(process(7, "engine", &[("kv_cache", TagState::Active), ("weights", TagState::Pausing)]));
            engine.status.as_mut().unwrap().memory.tags[1].progress = Some(Progress { stage: Stage::Save, done, total: GIB });
            sample(engine)
        };
        model.put(pausing(256 * MIB), then);
        model.put(pausing(768 * MIB), then + Duration::from_millis(250));
        let drawn = picture(&model, then, 80, 16);
        assert!(drawn.contains("engine (pid 7)") && drawn.contains("save [") && drawn.contains("]  75%"), "{drawn}");
        assert!(drawn.contains("Link   out 2.00 GiB/s now, in none yet"), "{drawn}");
        // Afterwards, the rate of the whole pause.
        let mut paused = process(7, "engine", &[("kv_cache", TagState::Active), ("weights", TagState::Paused)]);
        let stages = [(Stage::Save, 500.0)].into();
        paused.status.as_mut().unwrap().memory.totals =
            [(Verb::Pause, Totals { done: 1, bytes: GIB, kept_bytes: GIB, stages, ..Totals::default() })].into();
        model.put(sample(paused), then + Duration::from_millis(500));
        let drawn = picture(&model, then, 80, 16);
        assert!(drawn.contains("Link   out 2.00 GiB/s last, in none yet") && !drawn.contains("save ["), "{drawn}");
    }

    #[test]
    fn who_waits_and_why_is_shown_where_programs_share_gpus() {
        let now = Instant::now();
        let mut model = busy(now);
        assert!(!picture(&model, now, 80, 20).contains("Share"));
        model.sharing = Some(vec![
            "trainer waits 2.1 s: those in place have their turn for 0.5 s more, and after that it is its turn".into(),
            "9.0 s ago: trainer gave way (it was idle); engine came: changed in 210 ms".into(),
        ]);
        let picture = picture(&model, now, 80, 20);
        let shown: Vec<_> = picture.lines().skip(5).take(4).collect();
        let wanted = [
            "Share  trainer waits 2.1 s: those in place have their turn for 0.5 s more, and",
            "       after that it is its turn",
            "       9.0 s ago: trainer gave way (it was idle); engine came: changed in 210 ms",
            "",
        ];
        assert_eq!(shown, wanted, "{picture}");
    }

    #[test]
    fn utilization_that_nvml_does_not_report_is_no_zero() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        let cards =
            [Some(0), Some(100), None].into_iter().zip(0..).map(|(utilization, index)| (Card { utilization, ..card(index).0 }, Vec::new()));
        model.put_gpus(Gpus { cards: Ok(cards.collect()), climates: BTreeMap::new(), available: 0 }, now);
        let drawn = picture(&model, now, 80, 16);
        let starts: Vec<_> = drawn.lines().filter(|line| line.starts_with("GPU")).map(|line| &line[..12]).collect();
        assert_eq!(starts, ["GPU 0    0% ", "GPU 1  100% ", "GPU 2     - "]);
        assert!(drawn.lines().all(|line| line.len() <= 80), "{drawn}");
    }

    #[test]
    fn a_filter_shows_matching_names_with_their_tags_and_matching_tags_with_their_names() {
        let now = Instant::now();
        let mut model = busy(now);
        let mut titles = |filter: &str| {
            model.filter = filter.into();
            model.rows(now).into_iter().map(|row| row.title).collect::<Vec<_>>()
        };
        assert_eq!(titles("ENG"), ["engine (pid 7)", "kv_cache", "weights"]);
        assert_eq!(titles("weights"), ["engine (pid 7)", "weights", "trainer (pid 8)", "weights"]);
        assert_eq!(titles("nope"), [""; 0]);
        let drawn = picture(&model, now, 80, 16);
        assert!(drawn.contains("only those with \"nope\"") && drawn.contains("nothing contains \"nope\": esc shows all"), "{drawn}");
    }

    #[test]
    fn a_message_goes_after_a_while() {
        let now = Instant::now();
        let mut model = busy(now);
        model.say("resumed weights of engine".into(), now);
        let after = |seconds| picture(&model, now + Duration::from_secs(seconds), 80, 24);
        assert!(after(19).contains("resumed weights") && !after(21).contains("resumed weights"), "{}", after(19));
    }

    #[test]
    fn a_silent_process_keeps_its_last_values() {
        let now = Instant::now();
        let mut model = busy(now);
        let later = now + Duration::from_secs(7);
        assert!(picture(&model, later, 80, 16).contains("no answer for 7 s"));
        let mut silent = process(7, "engine", &[]);
        silent.status = Err(CommandError::new(Exit::Busy, "no answer"));
        model.put(sample(silent), later);
        let drawn = picture(&model, later, 80, 16);
        assert!(drawn.contains("kv_cache") && drawn.contains("no answer for 7 s"), "{drawn}");
        model.remove(7);
        assert!(!picture(&model, later, 80, 16).contains("engine"));
        // NVML may be silent, too.
        assert!(drawn.contains("NVML has not answered for 7 s"), "{drawn}");
    }

    #[test]
    fn a_process_that_never_answered_has_a_row() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        let failure = CommandError::new(Exit::Busy, "no answer");
        model.put(sample(Process { pid: 5, name: None, status: Err(failure) }), now);
        assert!(picture(&model, now, 80, 16).contains(">   pid 5               no answer for 0 s"), "{}", picture(&model, now, 80, 16));
    }

    #[test]
    fn the_tightest_limit_on_host_memory_is_shown() {
        let now = Instant::now();
        let mut model = busy(now);
        for (pid, free) in [(7, 30 * GIB), (8, 20 * GIB), (9, 40 * GIB)] {
            let room = Some(Room { free, all: 50 * GIB + free });
            model.put(Sample { room, ..sample(process(pid, "engine", &[])) }, now);
        }
        assert!(picture(&model, now, 80, 16).contains("; 20.00 GiB free of 70.00 GiB"), "{}", picture(&model, now, 80, 16));
    }

    #[test]
    fn an_empty_machine_is_reported_as_empty() {
        let now = Instant::now();
        let mut model = Model::new(Duration::from_secs(1));
        assert!(picture(&model, now, 80, 16).contains("looking for managed processes"));
        model.found = Some(2);
        assert!(picture(&model, now, 80, 16).contains("asking 2 processes: no answer yet"));
        model.remove(7);
        model.remove(8);
        let drawn = picture(&model, now, 80, 16);
        assert!(
            drawn.contains("no process is managed: start one with `vramctl run -- COMMAND`") && drawn.contains("NVML has not answered yet"),
            "{drawn}"
        );
        model.put_gpus(
            Gpus { cards: Err(NoCards::NoLibrary("no libnvidia-ml.so.1".into())), climates: BTreeMap::new(), available: 60 * GIB },
            now,
        );
        let drawn = picture(&model, now, 80, 16);
        let words = drawn.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("NVML cannot be loaded: no libnvidia-ml.so.1."), "{drawn}");
        assert!(words.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility") && words.contains("60.00 GiB free"), "{drawn}");
        model.trouble = Some("the directory is another user's".into());
        assert!(picture(&model, now, 80, 16).contains("the directory is another user's"));
    }

    #[test]
    fn no_size_is_too_small_or_too_large() {
        let now = Instant::now();
        let mut model = busy(now);
        model.put_gpus(Gpus { cards: Ok((0..8).map(card).collect()), climates: BTreeMap::new(), available: 0 }, now);
        for overlay in [
            Overlay::Nothing,
            Overlay::Help,
            Overlay::Question { words: vec!["pause".into(), "x".repeat(300)], what: "ü".repeat(500), lost: "all ".repeat(99) },
        ] {
            model.overlay = overlay;
            model.say("said\n".repeat(50) + &"long ".repeat(200), now);
            for (width, height) in [(1, 1), (2, 3), (10, 4), (40, 8), (80, 5), (80, 10), (81, 24), (300, 100)] {
                picture(&model, now, width, height);
            }
        }
        model.overlay = Overlay::Nothing;
        // All eight GPUs in 24 lines, fewer in 14, and the table in both.
        let shown = |height| picture(&model, now, 80, height).lines().filter(|line| line.starts_with("GPU ")).count();
        assert_eq!(shown(30), 8);
        assert!((1..8).contains(&shown(14)), "{}", picture(&model, now, 80, 14));
        assert!(picture(&model, now, 80, 14).contains("engine"));
    }

    /// The table's least height is part of it.
    #[test]
    fn where_there_is_room_for_all_of_it_every_gpu_is_shown() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        model.put_gpus(Gpus { cards: Ok((0..2).map(card).collect()), climates: BTreeMap::new(), available: 0 }, now);
        for pid in 1..=4 {
            let mut buffer = Buffer::empty(Rect::new(0, 0, 80, height(&model, 80, now)));
            draw(&mut buffer, &model, now, false);
            let drawn = text(&buffer, false);
            assert_eq!(drawn.lines().filter(|line| line.starts_with("GPU ")).count(), 2, "{drawn}");
            model.put(sample(process(pid, "engine", &[])), now);
        }
    }

    #[test]
    fn the_selected_row_is_in_sight() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        for pid in 1..=50 {
            model.put(sample(process(pid, &format!("program-{pid:02}"), &[])), now);
        }
        let selected = |model: &Model| picture(model, now, 80, 16).lines().find(|line| line.starts_with("> ")).map(str::to_owned).unwrap();
        assert!(selected(&model).contains("program-01"));
        model.select(30, now);
        assert!(selected(&model).contains("program-31"));
        model.select(isize::MAX, now);
        assert!(selected(&model).contains("program-50"));
        // Rows that appear or disappear above do not move the selection; the end of its own row does.
        model.remove(3);
        assert!(selected(&model).contains("program-50"));
        model.remove(50);
        assert!(selected(&model).contains("program-49"));
    }

    #[test]
    fn a_name_of_several_processes_is_one_row_that_can_be_opened() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        model.put(sample(process(1, "engine", &[("kv", TagState::Active)])), now);
        model.put(sample(process(2, "engine", &[("kv", TagState::Paused)])), now);
        let rows = |model: &Model| {
            model.rows(now).iter().map(|row| (row.title.clone(), row.state.clone(), row.active / GIB, row.paused / GIB)).collect::<Vec<_>>()
        };
        let row = |title: &str, state: &str, active, paused| (title.to_owned(), state.to_owned(), active, paused);
        assert_eq!(rows(&model), [row("engine x2", "active; paused", 1, 1), row("kv", "active, paused", 1, 1)]);
        model.view = View::Processes;
        assert_eq!(rows(&model)[1..], [row("pid 1", "active", 1, 0), row("pid 2", "paused", 0, 1)]);
    }

    #[test]
    fn rows_come_in_order() {
        use crate::commands::top::model::Order;
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        model.put(sample(process(1, "b", &[("x", TagState::Active)])), now);
        model.put(sample(process(2, "a", &[("x", TagState::Paused)])), now);
        model.put(sample(process(3, "c", &[("x", TagState::Pausing), ("y", TagState::Active)])), now);
        let names =
            |model: &Model| model.rows(now).into_iter().filter(|row| !row.is_child()).map(|row| row.key.name.unwrap()).collect::<String>();
        assert_eq!(names(&model), "abc");
        model.order = Order::Size;
        assert_eq!(names(&model), "cab");
        model.order = Order::State;
        assert_eq!(names(&model), "cba");
    }

    /// Other programs choose names and tags.
    #[test]
    fn names_do_not_control_the_terminal_nor_break_the_columns() {
        let (now, mut model) = (Instant::now(), Model::new(Duration::from_secs(1)));
        model.put(
            sample(process(
                1,
                "evil\x1b[2J\nname-that-is-far-too-long-for-its-column",
                &[("日本語のタグの名前はとても長い", TagState::Active)],
            )),
            now,
        );
        let drawn = picture(&model, now, 80, 12);
        assert!(!drawn.contains('\x1b') && drawn.contains("evil\u{fffd}[2J\u{fffd}.. (pid 1)"), "{drawn}");
        let widths: Vec<_> = drawn.lines().filter(|line| line.contains("active")).map(width_of).collect();
        assert_eq!(widths, [80, 80], "{drawn}");
    }

    #[test]
    fn a_bar_adds_up_and_the_smallest_give_way() {
        let parts = [(Slice::Letter('a'), 2), (Slice::Driver, 1), (Slice::Unmanaged, 0), (Slice::Free, 1)];
        assert_eq!(shares(&parts, 10).iter().map(|(_, cells)| *cells).collect::<Vec<_>>(), [5, 3, 0, 2]);
        let cells = |parts: &[(Slice, u64)], cells| shares(parts, cells).iter().map(|(_, cells)| cells).sum::<usize>();
        for width in 0..100 {
            assert_eq!(cells(&parts, width), width);
            assert_eq!(cells(&[(Slice::Free, u64::MAX), (Slice::Driver, u64::MAX), (Slice::Others, 1)], width), width);
        }
        assert_eq!(cells(&[], 10), 0);
    }

    #[test]
    fn long_lines_break_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrapped("日本語", 1), ["日", "本", "語"]);
        assert_eq!(wrapped("", 5), [""]);
        assert_eq!((fit("abcdef", 5), fit("abc", 3), fit("abc", 1)), ("abc..".into(), "abc".into(), ".".into()));
    }
}
