//! Aligned tables for people: columns as wide as their content, no trailing spaces, no wrapped
//! cells. On a narrow terminal the least important columns are cut, or left out if a stub would be
//! useless; a last line names these. In a pipe everything is printed in full.

use super::screen::{Screen, Tint};
use super::text::Text;
use crate::domain::printable;

/// The content of a cell without a known value.
pub const UNKNOWN: &str = "-";

/// The gap between two columns.
const GAP: &str = "  ";
/// Minimum width of a cut column. `Unhealthy` has nine characters.
const COLUMN_MIN: usize = 10;
/// Minimum width of the first column in `shrinking`, as long as another column can be cut. It
/// mostly contains ids, and a PCI address has 12 characters.
const FIRST_MIN: usize = 12;

/// A table with a header. Put the column of unbounded length last: it then moves no other column.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Row>,
    /// Columns to cut if space is short, the first one first.
    shrinking: Vec<usize>,
    /// Columns to leave out before any column after the first of `shrinking` is cut.
    omittable: Vec<usize>,
    tints: Vec<(usize, Tinting)>,
    is_sparse: bool,
}

/// The colour of a cell, by its content.
type Tinting = fn(&str) -> Tint;

#[derive(Debug, Clone)]
enum Row {
    Cells(Vec<String>),
    /// A line across all columns; it does not affect their widths.
    Line(String),
}

impl Table {
    /// A table with these column headings, printed in capitals. On a narrow screen the last column
    /// is cut.
    #[must_use]
    pub fn new(headings: &[&str]) -> Self {
        let rows =
            vec![Row::Cells(headings.iter().map(|heading| heading.to_uppercase()).collect())];
        Table {
            rows,
            shrinking: vec![headings.len().saturating_sub(1)],
            omittable: Vec::new(),
            tints: Vec::new(),
            is_sparse: false,
        }
    }

    /// Sets the columns that are cut on a narrow screen, the first one first.
    #[must_use]
    pub fn shrinking(mut self, headings: &[&str]) -> Self {
        self.shrinking = headings.iter().filter_map(|heading| self.column(heading)).collect();
        self
    }

    /// Sets the columns that are left out, the first one first, if cutting the first column is not
    /// enough: a stub of them would be useless. Columns without any known value are left out before
    /// anything is cut, even the first column to cut.
    #[must_use]
    pub fn omitting(mut self, headings: &[&str]) -> Self {
        self.omittable = headings.iter().filter_map(|heading| self.column(heading)).collect();
        self
    }

    /// Sets the colours of a column by its content.
    #[must_use]
    pub fn tinted(mut self, heading: &str, tint: Tinting) -> Self {
        self.tints.extend(self.column(heading).map(|column| (column, tint)));
        self
    }

    /// For tables with mostly unknown cells: they are blank, and a column without any known value
    /// is left out. The first column to cut is left out too, if a useful part of it does not fit.
    #[must_use]
    pub fn sparse(self) -> Self {
        Table { is_sparse: true, ..self }
    }

    fn column(&self, heading: &str) -> Option<usize> {
        let Some(Row::Cells(headings)) = self.rows.first() else { return None };
        headings.iter().position(|known| *known == heading.to_uppercase())
    }

    /// Adds a row; an empty cell is printed as unknown.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let unknown = self.unknown();
        let cells = cells.into_iter().map(|cell| {
            if cell.is_empty() { unknown.to_owned() } else { printable(&cell).into_owned() }
        });
        self.rows.push(Row::Cells(cells.collect()));
    }

    /// The content of a cell without a known value.
    fn unknown(&self) -> &'static str {
        if self.is_sparse { "" } else { UNKNOWN }
    }

    /// Adds a line across all columns.
    pub fn line(&mut self, text: &str) {
        self.rows.push(Row::Line(printable(text).into_owned()));
    }

    /// Whether there is only the header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    fn cells(&self) -> impl Iterator<Item = &[String]> {
        self.rows.iter().filter_map(|row| {
            if let Row::Cells(cells) = row { Some(cells.as_slice()) } else { None }
        })
    }

    /// The width of each column on a screen.
    fn widths(&self, screen: Screen) -> Vec<usize> {
        let columns = self.cells().map(<[String]>::len).max().unwrap_or(0);
        let content = |column: usize| {
            self.cells()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let heading = |column: usize| {
            self.cells()
                .next()
                .and_then(|headings| headings.get(column))
                .map_or(0, |text| text.chars().count())
        };
        let is_unknown = |column: usize| {
            self.cells()
                .skip(1)
                .all(|row| row.get(column).is_none_or(|cell| cell == self.unknown()))
        };
        let is_blank = |column| self.is_sparse && is_unknown(column);
        let mut widths: Vec<usize> =
            (0..columns).map(|column| if is_blank(column) { 0 } else { content(column) }).collect();
        let shown = widths.iter().filter(|width| **width > 0).count();
        let whole = widths.iter().sum::<usize>() + GAP.len() * shown.saturating_sub(1);
        let mut over = screen.width.map_or(0, |width| whole.saturating_sub(width));
        for column in self
            .shrinking
            .iter()
            .take(1)
            .chain(&self.omittable)
            .filter(|column| is_unknown(**column))
        {
            let Some(width) = widths.get_mut(*column).filter(|width| over > 0 && **width > 0)
            else {
                continue;
            };
            over = over.saturating_sub(*width + GAP.len());
            *width = 0;
        }
        for (index, column) in self.shrinking.iter().enumerate() {
            if index == 1 {
                for out in &self.omittable {
                    let Some(width) = widths.get_mut(*out).filter(|width| over > 0 && **width > 0)
                    else {
                        continue;
                    };
                    let freed = *width + GAP.len();
                    *width = 0;
                    // Return excess width to the first column, if it was cut before.
                    if let Some((first, width)) = self
                        .shrinking
                        .first()
                        .and_then(|first| Some((*first, widths.get_mut(*first)?)))
                    {
                        *width = if *width > 0 {
                            (*width + freed.saturating_sub(over)).min(content(first))
                        } else {
                            0
                        };
                    }
                    over = over.saturating_sub(freed);
                }
            }
            let Some(width) = widths.get_mut(*column) else { continue };
            let least = if index == 0 && !self.is_sparse { FIRST_MIN } else { COLUMN_MIN };
            let cut = width.saturating_sub(heading(*column).max(least));
            if self.is_sparse && over > cut && *width > 0 && Some(column) == self.shrinking.first()
            {
                // The rest of the column is worth less than the other columns: leave it out.
                over = over.saturating_sub(*width + GAP.len());
                *width = 0;
            } else {
                *width -= over.min(cut);
                over = over.saturating_sub(cut);
            }
        }
        if let Some((first, width)) =
            self.shrinking.first().and_then(|first| Some((*first, widths.get_mut(*first)?)))
        {
            *width -= over.min(width.saturating_sub(heading(first).max(COLUMN_MIN)));
        }
        widths
    }

    /// The table as text for a screen.
    #[must_use]
    pub fn on(&self, screen: Screen) -> Text {
        let widths = self.widths(screen);
        let mut text = Text::default();
        for (index, row) in self.rows.iter().enumerate() {
            let cells = match row {
                Row::Cells(cells) => cells,
                Row::Line(line) => {
                    text.paint(
                        screen,
                        Tint::Bold,
                        &screen.clip(line, screen.width.unwrap_or(usize::MAX)),
                    );
                    text.end_line();
                    continue;
                }
            };
            // Spaces are not coloured, and trailing spaces are omitted.
            let mut space = 0;
            for (column, (cell, &width)) in
                cells.iter().zip(&widths).enumerate().filter(|(_, (_, width))| **width > 0)
            {
                let shown = screen.shorten(cell, width);
                let seen = shown.trim_end();
                if seen.is_empty() {
                    space += width + GAP.len();
                    continue;
                }
                let tint = self
                    .tints
                    .iter()
                    .find(|(of, _)| *of == column)
                    .map_or(Tint::Plain, |(_, tint)| tint(cell));
                // A width in a format string has at most 65,535 columns.
                text.put(format_args!("{}", " ".repeat(space)));
                text.paint(screen, if index == 0 { Tint::Dim } else { tint }, seen);
                space = width - seen.chars().count() + GAP.len();
            }
            text.end_line();
        }
        let hidden = self.hidden(&widths);
        if !hidden.is_empty() {
            let line = format!("left out on this width: {}", hidden.join(", "));
            text.paint(screen, Tint::Dim, &screen.clip(&line, screen.width.unwrap_or(usize::MAX)));
            text.end_line();
        }
        text
    }

    /// The headings of the columns that are left out although they have known values.
    fn hidden(&self, widths: &[usize]) -> Vec<&str> {
        let has_values = |column: usize| {
            let cells = self.cells().skip(1).filter_map(|row| row.get(column));
            cells.into_iter().any(|cell| cell != self.unknown())
        };
        let headings = self.cells().next().into_iter().flatten().zip(widths).enumerate();
        let hidden = headings.filter(|(column, (_, width))| **width == 0 && has_values(*column));
        hidden.map(|(_, (heading, _))| heading.as_str()).collect()
    }
}

impl From<Table> for Text {
    fn from(table: Table) -> Text {
        table.on(Screen::get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(table: &Table) -> Text {
        table.on(Screen::default())
    }

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let mut table = Table::new(&["name", "state", "id"]);
        assert!(table.is_empty());
        table.row(["a-long-name", "", "x"].map(str::to_owned));
        table.row(["b", "live", ""].map(str::to_owned));
        assert_eq!(
            plain(&table),
            "NAME         STATE  ID\na-long-name  -      x\nb            live   -\n"
        );
    }

    #[test]
    fn a_column_may_have_any_width() {
        let mut table = Table::new(&["name", "state"]);
        let long = "x".repeat(70_000);
        table.row([long.clone(), "live".into()]);
        let space = " ".repeat(long.len() - "NAME".len());
        assert_eq!(plain(&table), *format!("NAME{space}  STATE\n{long}  live\n"));
    }

    #[test]
    fn no_control_character_reaches_the_terminal() {
        let mut table = Table::new(&["name"]);
        table.row(["a\x1b[31m\nb\u{202e}".to_owned()]);
        table.line("c\r");
        assert_eq!(plain(&table), "NAME\na\\u{1b}[31m\\nb\\u{202e}\nc\\r\n");
    }

    #[test]
    fn on_a_narrow_screen_the_least_important_column_shrinks_first() {
        let mut table =
            Table::new(&["pod", "resource", "device"]).shrinking(&["device", "resource"]);
        table.row(["ml/train-0", "nvidia.com/gpu", "GPU-5a7c1f00-1111-2222"].map(str::to_owned));
        let on = |width| table.on(Screen { width: Some(width), ..Screen::default() });
        assert_eq!(on(50), plain(&table));
        assert_eq!(
            on(44),
            "POD         RESOURCE        DEVICE\nml/train-0  nvidia.com/gpu  GPU-5a7…111-2222\n"
        );
        assert_eq!(
            on(38),
            "POD         RESOURCE      DEVICE\nml/train-0  nvidi…om/gpu  GPU-5…1-2222\n"
        );
        assert_eq!(on(34), "POD         RESOURCE    DEVICE\nml/train-0  nvid…m/gpu  GPU-…-2222\n");
        assert!(on(10).contains("nvid…m/gpu  GPU-…-2222"), "a minimum width remains");
    }

    #[test]
    fn an_omittable_column_is_omitted_before_a_second_column_shrinks() {
        let table =
            Table::new(&["pod", "since", "resource", "device"]).shrinking(&["device", "resource"]);
        let mut table = table.omitting(&["since"]);
        table.row(
            ["ml/train-0", "2026-11-22T12:05:57Z", "nvidia.com/gpu", "GPU-5a7c1f00-1111-2222"]
                .map(str::to_owned),
        );
        let on = |width| table.on(Screen { width: Some(width), ..Screen::default() });
        assert_eq!(
            on(66),
            "POD         SINCE                 RESOURCE        DEVICE\nml/train-0  2026-11-22T12:05:57Z  nvidia.com/gpu  GPU-5a7…111-2222\n"
        );
        assert_eq!(
            on(47),
            "POD         RESOURCE        DEVICE\nml/train-0  nvidia.com/gpu  GPU-5a7c1…1111-2222\n\
             left out on this width: SINCE\n"
        );
    }

    #[test]
    fn a_sparse_table_omits_columns_without_values() {
        let mut table = Table::new(&["device", "health", "held by"]).sparse();
        table.row(["a", "", ""].map(str::to_owned));
        table.row(["b", "", "ml/train-0"].map(str::to_owned));
        assert_eq!(plain(&table), "DEVICE  HELD BY\na\nb       ml/train-0\n");
    }

    #[test]
    fn a_column_without_values_is_omitted_before_another_shrinks() {
        let mut table = Table::new(&["address", "driver", "until", "id"]).omitting(&["driver"]);
        table.row(["/dev/sensor0", "", "", "dev:sensor0"].map(str::to_owned));
        let on = |width| table.on(Screen { width: Some(width), ..Screen::default() });
        assert_eq!(
            on(40),
            "ADDRESS       DRIVER  UNTIL  ID\n/dev/sensor0  -       -      dev:sensor0\n"
        );
        assert_eq!(on(39), "ADDRESS       UNTIL  ID\n/dev/sensor0  -      dev:sensor0\n");
        assert_eq!(on(31), "ADDRESS       UNTIL  ID\n/dev/sensor0  -      dev:…nsor0\n");
        let mut table = Table::new(&["address", "names", "resource", "id"])
            .shrinking(&["id", "resource"])
            .omitting(&["names"]);
        table.row(["0000:3b:01.0", "ens1f0v0", "intel.com/sriov", ""].map(str::to_owned));
        let narrow = Screen { width: Some(40), ..Screen::default() };
        assert_eq!(
            table.on(narrow),
            "ADDRESS       NAMES     RESOURCE\n0000:3b:01.0  ens1f0v0  intel.com/sriov\n"
        );
    }

    #[test]
    fn colours_move_nothing_and_cover_no_spaces() {
        let mut table = Table::new(&["health", "id"])
            .tinted("health", |cell| if cell == "bad" { Tint::Red } else { Tint::Plain });
        table.row(["bad", "x"].map(str::to_owned));
        table.row(["good", "bad"].map(str::to_owned));
        let coloured = table.on(Screen { colour: true, ..Screen::default() });
        assert_eq!(
            coloured,
            "\x1b[2mHEALTH\x1b[0m  \x1b[2mID\x1b[0m\n\x1b[31mbad\x1b[0m     x\ngood    bad\n"
        );
    }
}
