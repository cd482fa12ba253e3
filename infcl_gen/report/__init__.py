"""Pages for people: a plan or measurements as one self-contained HTML file. Each module is one stage:

figures     marks, figures, tables and sections as records, and the charts that are made of marks
plan        the sections of a plan
bench       the sections of measured rows
page        records -> the text of a page, through templates/report

Charts are marks that the template prints, so that one stylesheet gives them colours for light and dark, and every text
passes through its escaping. A page needs neither matplotlib nor a script.
"""
