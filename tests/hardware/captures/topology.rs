//! `topology` of every captured machine: each device is in the tree once, and lines fit a terminal.

use crate::hardware::captures::archive::{Capture, captures};
use holdfast::cli::topology::{Known, picture, text};
use holdfast::console::screen::Screen;
use holdfast::domain::{DeviceClass, MigStrategy};
use holdfast::hardware::{DiscoverInput, defaults, discover_with, scan};
use holdfast::host::HostRoot;
use holdfast::picture::{Part, fold, svg};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn ids<'a>(parts: &'a [Part], into: &mut Vec<&'a str>) {
    for part in parts {
        into.extend(part.device.as_ref().map(|leaf| leaf.id.as_str()));
        ids(&part.parts, into);
    }
}

#[test]
fn every_captured_machine_is_drawn_whole_and_fits_a_terminal() {
    let Some(captures) = captures() else { return };
    for Capture { name, root, .. } in &captures {
        let root = HostRoot::new(root);
        let functions = scan(&root);
        let specs: Vec<_> =
            defaults::specs(&functions, MigStrategy::None).into_iter().map(Arc::new).collect();
        let found =
            discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()));
        let picture = picture(&root, &found, &Known::default());
        let mut drawn = Vec::new();
        ids(&picture.parts, &mut drawn);
        let known: BTreeSet<&str> = found
            .devices
            .iter()
            .filter(|device| device.class != DeviceClass::Other)
            .map(|device| device.id.as_str())
            .collect();
        assert_eq!(drawn.len(), known.len(), "{name}: a device is missing, or there twice");
        assert_eq!(drawn.into_iter().collect::<BTreeSet<_>>(), known, "{name}");
        for all in [false, true] {
            let figure = fold(&picture, all);
            for ascii in [false, true] {
                let screen = Screen { width: Some(80), ascii, ..Screen::default() };
                let lines = text(&figure, picture.count(), screen);
                assert!(lines.lines().all(|line| line.chars().count() <= 80), "{name}:\n{lines}");
                assert!(!ascii || lines.is_ascii(), "{name}:\n{lines}");
            }
            let svg = svg::draw(&figure, picture.count(), usize::MAX);
            assert_eq!(svg.matches("<g").count(), svg.matches("</g>").count(), "{name}");
        }
    }
}
