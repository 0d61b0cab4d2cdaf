"""Files of the form of CinC 2012 and MIMIC-III, with invented stays."""

import csv
import gzip
import io

import numpy as np


def write_cinc(folder, count, seed=0):
    """So many stays of random length, one of them of unknown length besides."""
    generator = np.random.default_rng(seed)
    records = folder / "set-a"
    records.mkdir(parents=True)
    outcomes = ["RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"]
    for number in range(count + 1):
        record = 170_000 + 37 * number
        days = -1 if number == 5 else int(generator.integers(3, 14))
        outcomes.append(f"{record},6,1,{days},-1,0")
        rows = ["Time,Parameter,Value", f"00:00,RecordID,{record}", "00:00,Age,54"]
        for minute in np.sort(generator.integers(0, 2880, generator.integers(1, 20))):
            time = f"{minute // 60:02}:{minute % 60:02}"
            rows += [f"{time},HR,{generator.integers(50, 140)}"]
            rows += [f"{time},pH,{generator.uniform(7.1, 7.5):.2f}", f"{time},K,4.1"]
        (records / f"{record}.txt").write_text("\n".join(rows) + "\n")
    (folder / "Outcomes-a.txt").write_text("\n".join(outcomes) + "\n")
    return folder


def csv_bytes(title, rows):
    """A table as MIMIC's are written: every text in quotation marks."""
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(title)
    writer.writerows(rows)
    return file.getvalue().encode()


def write_table(folder, name, title, rows, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    content = csv_bytes(title, rows)
    path = folder / (f"{name}.csv.gz" if zipped else f"{name}.csv")
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return path
