//! A figure as SVG: frames for places, a box for each device, and its holders below the box.
//!
//! It is readable on light and dark backgrounds: boxes have their own background, and text outside
//! boxes is a middle grey. The state of a device is shown by a sign, a word and a colour, in that
//! order. The tooltip of each box has all facts of its device.

use super::fold::{Alike, Figure, Shown};
use super::holder::Holder;
use super::leaf::Leaf;
use super::markup::{clip, escape};
use super::part::Count;
use crate::domain::clip_middle;
use std::fmt::Write;

/// Width of the whole drawing; further boxes start a new row.
const WIDTH: u32 = 1120;
const BOX_WIDTH: u32 = 160;
const BOX_HEIGHT: u32 = 62;
const HOLDER_HEIGHT: u32 = 20;
const GAP: u32 = 10;
const PAD: u32 = 12;
const TITLE_HEIGHT: u32 = 26;
/// Characters of 11 pixels that fit into a box.
const BOX_CHARS: usize = 23;
/// The most holders that are drawn below a box.
const HOLDERS_MAX: usize = 3;

/// Marks that are drawn, because not every font has them.
const CHECK: &str = "M1 6 L4.5 9.5 L11 2";
const CROSS: &str = "M2 2 L10 10 M10 2 L2 10";
const DASH: &str = "M2 6 L10 6";

/// The style of a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Healthy,
    Unhealthy,
    /// Offered, but not judged yet.
    Unknown,
    NotOffered,
}

impl Style {
    /// The style of a device with unknown health.
    fn unjudged(resources: &[String]) -> Style {
        if resources.is_empty() { Style::NotOffered } else { Style::Unknown }
    }

    fn in_words(self) -> &'static str {
        match self {
            Style::Healthy => "healthy",
            Style::Unhealthy => "unhealthy",
            Style::Unknown => "not judged",
            Style::NotOffered => "not offered",
        }
    }

    /// Background, border, and the mark.
    fn colours(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Style::Healthy => ("#e6f4ea", "#1e7e34", CHECK),
            Style::Unhealthy => ("#fde7e6", "#c5221f", CROSS),
            Style::Unknown => ("#ffffff", "#5f6368", DASH),
            Style::NotOffered => ("#f1f3f4", "#80868b", DASH),
        }
    }
}

/// A finished part of the drawing, with its size in pixels.
#[derive(Debug)]
struct Tile {
    width: u32,
    height: u32,
    svg: String,
}

/// Draws a figure with at most `boxes_max` boxes; the number of missing devices is written below.
#[must_use]
pub fn draw(figure: &Figure, count: Count, boxes_max: usize) -> String {
    let mut pen = Pen { left: boxes_max, missing: 0 };
    let tiles: Vec<Tile> = figure.parts.iter().filter_map(|part| pen.tile(part, WIDTH)).collect();
    let Tile { width, mut height, svg } = rows(&tiles, 0);
    let head = format!("{count}");
    let mut text = format!("<text x=\"0\" y=\"14\" class=\"hf-head\">{}</text>", escape(&head));
    let _infallible = write!(text, "<g transform=\"translate(0 {TITLE_HEIGHT})\">{svg}</g>");
    height += TITLE_HEIGHT;
    if pen.missing > 0 {
        height += TITLE_HEIGHT;
        let _infallible = write!(
            text,
            "<text x=\"0\" y=\"{}\" class=\"hf-head\">and {} more that are not drawn</text>",
            height - 8,
            pen.missing
        );
    }
    let (width, height) = (width.max(480) + 2 * GAP, height + 2 * GAP);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-{GAP} -{GAP} {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\" aria-label=\"{}\" font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"11\">\n\
         <style>.hf-head{{fill:#777;font-size:13px}} .hf-title{{fill:#777;font-weight:600}} .hf-name{{fill:#202124;font-weight:600}} \
         .hf-text{{fill:#3c4043}}</style>\n{text}</svg>\n",
        escape(&format!("the node's devices: {head}")),
    )
}

/// Counts the boxes that may still be drawn.
#[derive(Debug)]
struct Pen {
    left: usize,
    missing: usize,
}

impl Pen {
    fn tile(&mut self, part: &Shown, width: u32) -> Option<Tile> {
        match part {
            Shown::Group { title, parts } => {
                let tiles: Vec<Tile> =
                    parts.iter().filter_map(|part| self.tile(part, width - 2 * PAD)).collect();
                Some(frame(title, &tiles, width))
            }
            Shown::Alike(alike) => self.reserve(alike.count).then(|| equal_devices(alike)),
            Shown::Device { leaf, parts } => {
                let own = self.reserve(1).then(|| device(leaf))?;
                if parts.is_empty() {
                    return Some(own);
                }
                let mut tiles = vec![own];
                tiles.extend(parts.iter().filter_map(|part| self.tile(part, width - 2 * PAD)));
                Some(frame(
                    &format!("{} {} and its parts", leaf.kind(), leaf.name()),
                    &tiles,
                    width,
                ))
            }
        }
    }

    fn reserve(&mut self, devices: usize) -> bool {
        if self.left == 0 {
            self.missing += devices;
            return false;
        }
        self.left -= 1;
        true
    }
}

/// Tiles in rows of at most this width; zero means the width of the whole drawing.
fn rows(tiles: &[Tile], width: u32) -> Tile {
    let max = if width == 0 { WIDTH } else { width };
    let (mut x, mut y, mut row, mut widest) = (0, 0, 0, 0);
    let mut svg = String::new();
    for tile in tiles {
        if x > 0 && x + tile.width > max {
            (x, y, row) = (0, y + row + GAP, 0);
        }
        let _infallible = write!(svg, "<g transform=\"translate({x} {y})\">{}</g>", tile.svg);
        widest = widest.max(x + tile.width);
        row = row.max(tile.height);
        x += tile.width + GAP;
    }
    Tile { width: widest, height: y + row, svg }
}

fn frame(title: &str, tiles: &[Tile], max: u32) -> Tile {
    let inner = rows(tiles, max - 2 * PAD);
    // At least as wide as its title.
    let of_title = u32::try_from(title.chars().count()).unwrap_or(0).min(70) * 7;
    let width = (inner.width.max(of_title) + 2 * PAD).min(max);
    let height = TITLE_HEIGHT + inner.height + if tiles.is_empty() { GAP } else { PAD };
    let chars = usize::try_from((width - PAD) / 6).unwrap_or(usize::MAX);
    let svg = format!(
        "<rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#888\" fill-opacity=\"0.07\" stroke=\"#888\" stroke-opacity=\"0.6\"/>\
         <text x=\"{PAD}\" y=\"17\" class=\"hf-title\">{}</text><g transform=\"translate({PAD} {TITLE_HEIGHT})\">{}</g>",
        escape(&clip(title, chars)),
        inner.svg,
    );
    Tile { width, height, svg }
}

fn device(leaf: &Leaf) -> Tile {
    let style = match leaf.health {
        Some("Healthy") => Style::Healthy,
        Some(_) => Style::Unhealthy,
        None => Style::unjudged(&leaf.resources),
    };
    let state = leaf.state().unwrap_or_else(|| style.in_words().into());
    let about = [
        leaf.resources.join(", "),
        leaf.about().unwrap_or_default(),
        leaf.model.clone().unwrap_or_default(),
        leaf.names.join(", "),
    ];
    let mut facts =
        vec![format!("{} {}", leaf.kind(), leaf.name()), leaf.id.clone(), state.clone()];
    facts.extend(about.iter().filter(|text| !text.is_empty()).cloned());
    facts.extend(leaf.holders.iter().map(|holder| format!("held by {}", held(holder))));
    let about = about.iter().find(|text| !text.is_empty()).cloned().unwrap_or_default();
    let mut tile =
        plain(style, &leaf.kind(), &short(&leaf.name()), &about, &state, &facts.join(" · "));
    let names = leaf.holders.iter().take(HOLDERS_MAX).map(Holder::with_state);
    let more = leaf.holders.len().saturating_sub(HOLDERS_MAX);
    for name in names.chain((more > 0).then(|| format!("and {more} more"))) {
        let _infallible = write!(
            tile.svg,
            "<rect x=\"10\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#e8f0fe\" stroke=\"#4a6fa5\" stroke-width=\"0.7\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" class=\"hf-text\">{}</text>",
            tile.height + 3,
            BOX_WIDTH - 20,
            HOLDER_HEIGHT - 3,
            BOX_WIDTH / 2,
            tile.height + 15,
            escape(&clip_middle(&name, BOX_CHARS - 3, '…')),
        );
        tile.height += HOLDER_HEIGHT;
    }
    tile
}

fn equal_devices(alike: &Alike) -> Tile {
    let style = match (alike.unhealthy, alike.is_healthy) {
        (0, true) => Style::Healthy,
        (0, false) => Style::unjudged(&alike.resources),
        _ => Style::Unhealthy,
    };
    let state = alike.state().unwrap_or_else(|| style.in_words().into());
    let state = if alike.held > 0 { format!("{state}, {} held", alike.held) } else { state };
    let about = alike.resources.join(", ");
    let (first, last) = &alike.range;
    let all = format!("{} × {}, {first} to {last}, {about} {state}", alike.count, alike.kind);
    let about =
        if about.is_empty() { format!("{} to {}", short(first), short(last)) } else { about };
    let mut tile = plain(style, &format!("× {}", alike.count), &alike.kind, &about, &state, &all);
    // A second sheet behind the first one.
    tile.svg.insert_str(
        0,
        &format!(
            "<rect x=\"4\" y=\"4\" width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"6\" fill=\"none\" stroke=\"{}\"/>",
            style.colours().1
        ),
    );
    tile.height += 4;
    tile.width += 4;
    tile
}

fn plain(style: Style, name: &str, place: &str, about: &str, state: &str, all: &str) -> Tile {
    let (ground, edge, mark) = style.colours();
    let dashes = if style == Style::NotOffered { " stroke-dasharray=\"3 2\"" } else { "" };
    let width = if style == Style::Unhealthy { 2 } else { 1 };
    let svg = format!(
        "<g><title>{}</title><rect width=\"{BOX_WIDTH}\" height=\"{BOX_HEIGHT}\" rx=\"6\" fill=\"{ground}\" stroke=\"{edge}\" \
         stroke-width=\"{width}\"{dashes}/><text x=\"10\" y=\"18\" class=\"hf-name\">{}</text>\
         <text x=\"{}\" y=\"18\" text-anchor=\"end\" class=\"hf-text\">{}</text><text x=\"10\" y=\"35\" class=\"hf-text\">{}</text>\
         <path transform=\"translate(9 43)\" d=\"{mark}\" fill=\"none\" stroke=\"{edge}\" stroke-width=\"2.2\"/>\
         <text x=\"26\" y=\"53\" class=\"hf-text\">{}</text></g>",
        escape(all),
        escape(&clip(name, 14)),
        BOX_WIDTH - 10,
        escape(&clip(place, BOX_CHARS.saturating_sub(name.chars().count() + 1).max(4))),
        escape(&clip(about, BOX_CHARS)),
        escape(&clip(state, BOX_CHARS - 4)),
    );
    Tile { width: BOX_WIDTH, height: BOX_HEIGHT, svg }
}

/// A PCI address without the domain that nearly every machine has; the end of a long path.
fn short(name: &str) -> String {
    let name = name.strip_prefix("0000:").unwrap_or(name);
    let length = name.chars().count();
    if name.starts_with('/') && length > 16 {
        name.chars().skip(length - 15).fold("…".into(), |end: String, c| end + &c.to_string())
    } else {
        name.into()
    }
}

fn held(holder: &Holder) -> String {
    let container = holder
        .container
        .as_ref()
        .map(|container| format!(", container {container}"))
        .unwrap_or_default();
    format!("{}{container} since {}", holder.with_state(), holder.since.to_seconds())
}

#[cfg(test)]
mod tests {
    use super::super::markup::elements;
    use super::super::testing::{holder, leaf, machine};
    use super::super::{Cpus, Holder, fold, tree};
    use super::*;
    use crate::domain::DeviceClass;

    fn drawn(leaves: Vec<Leaf>, boxes_max: usize) -> String {
        let picture = tree(leaves, &Cpus::new());
        draw(&fold(&picture, false), picture.count(), boxes_max)
    }

    #[test]
    fn a_box_has_a_sign_a_word_and_a_colour_with_holders_below() {
        let svg = drawn(machine(), 100);
        elements(&svg);
        for text in [
            "xid (Xid 79)",
            CROSS,
            "#c5221f",
            "healthy",
            CHECK,
            "not offered",
            DASH,
            ">ml/train-0</text>",
            ">× 63</text>",
            "rdma vf",
        ] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        assert!(!svg.contains("not drawn"));
    }

    #[test]
    fn a_hostile_name_stays_a_text() {
        let evil = "\"/><script>alert(1)</script><text a='";
        let evil_holder =
            Holder { pod: Some(evil.into()), namespace: Some("</title>".into()), ..holder("x") };
        let gpu = leaf("0000:18:00.0", DeviceClass::Gpu, &[], None);
        let gpu = Leaf {
            holders: vec![evil_holder],
            model: Some(evil.into()),
            detail: Some("\u{0}\u{1b}".into()),
            id: evil.into(),
            ..gpu
        };
        let svg = drawn(vec![gpu], 100);
        elements(&svg);
        assert!(
            !svg.contains("<script") && !svg.contains('\u{1b}') && !svg.contains('\u{0}'),
            "{svg}"
        );
    }

    #[test]
    fn the_number_of_boxes_is_bounded_and_the_rest_is_counted() {
        let gpu = |n: u32| leaf(&format!("0000:{n:02x}:00.0"), DeviceClass::Gpu, &[], Some(n / 8));
        let svg = drawn((0..200).map(gpu).collect(), 50);
        elements(&svg);
        assert!(
            svg.contains("and 150 more that are not drawn")
                && svg.matches("class=\"hf-name\"").count() == 50
        );
    }
}
