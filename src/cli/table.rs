//! Aligned tables for people: columns as wide as their content, nothing wrapped, no trailing spaces.

use std::fmt;

/// What stands in a cell of which nothing is known.
pub const UNKNOWN: &str = "-";

/// A table with a header. Put the column of unbounded length last: it then moves no other column.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column headings, which are printed in capitals.
    #[must_use]
    pub fn new(headings: &[&str]) -> Self {
        Table { rows: vec![headings.iter().map(|heading| heading.to_uppercase()).collect()] }
    }

    /// Adds a row; an empty cell is printed as unknown.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| if cell.is_empty() { UNKNOWN.to_owned() } else { printable(&cell) }).collect());
    }

    /// Whether there is nothing but the header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }
}

/// Names come from hardware and from pods: control characters must not reach a terminal, nor break a row.
fn printable(cell: &str) -> String {
    cell.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let mut table = Table::new(&["name", "state", "id"]);
        assert!(table.is_empty());
        table.row(["a-long-name", "", "x"].map(str::to_owned));
        table.row(["b", "live", ""].map(str::to_owned));
        assert_eq!(table.to_string(), "NAME         STATE  ID\na-long-name  -      x\nb            live   -\n");
    }

    #[test]
    fn no_control_character_reaches_the_terminal() {
        let mut table = Table::new(&["name"]);
        table.row(["a\x1b[31m\nb".to_owned()]);
        assert_eq!(table.to_string(), "NAME\na?[31m?b\n");
    }
}
